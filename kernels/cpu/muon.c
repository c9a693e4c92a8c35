/* Muon's elementwise operations, and matrix products with factors. */
#include <cblas.h>
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/random.h"

enum { BLOCK = 4096 };

void backend_muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                           float grad_scale)
{
    check_muon_momentum(u, m, grad);
    const float rest = 1 - momentum;
    float *mi = cpu_scratch(0, BLOCK), *gi = cpu_scratch(1, BLOCK), *ui = cpu_scratch(2, BLOCK);
    for (size_t at = 0, numel = tensor_numel(u); at < numel; at += BLOCK) {
        const size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        tensor_load(mi, m, at, n);
        tensor_load(gi, grad, at, n);
        for (size_t i = 0; i < n; i++) {
            const float g = grad_scale * gi[i];
            mi[i] = momentum * mi[i] + rest * g;
            ui[i] = nesterov ? momentum * mi[i] + rest * g : mi[i];
        }
        tensor_store(m, at, mi, n);
        tensor_store(u, at, ui, n);
    }
}

void backend_muon_normalize(Tensor y, Tensor x, const float *squares, float eps)
{
    check_muon_normalize(y, x);
    const float norm = bf16_decode(bf16_encode(fmaxf(sqrtf(*squares), eps)));
    float *xi = cpu_scratch(0, BLOCK);
    for (size_t at = 0, numel = tensor_numel(x); at < numel; at += BLOCK) {
        const size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        tensor_load(xi, x, at, n);
        for (size_t i = 0; i < n; i++)
            xi[i] /= norm;
        tensor_store(y, at, xi, n);
    }
}

void backend_matmul_scaled(Tensor y, Tensor x, Tensor w, float alpha, Tensor add, float beta)
{
    check_matmul_scaled(y, x, w, add);
    const float *a = tensor_values(x, 0), *b = tensor_values(w, 1);
    float *sum = cpu_scratch(2, tensor_numel(y));
    tensor_load(sum, add, 0, tensor_numel(add));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, y.rows, y.cols, x.cols, alpha, a, x.cols,
                b, w.cols, beta, sum, y.cols);
    tensor_finish(y, sum);
}

void backend_matmul_symmetric(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta)
{
    check_matmul_symmetric(y, x, columns, add);
    const int R = y.rows;
    const float *a = tensor_values(x, 0);
    float *sum = cpu_scratch(1, tensor_numel(y));
    if (add.data)
        tensor_load(sum, add, 0, tensor_numel(add));
    cblas_ssyrk(CblasRowMajor, CblasLower, columns ? CblasTrans : CblasNoTrans, R,
                columns ? x.rows : x.cols, alpha, a, x.cols, add.data ? beta : 0, sum, R);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < r; c++)
            sum[(size_t)c * (size_t)R + (size_t)r] = sum[(size_t)r * (size_t)R + (size_t)c];
    tensor_finish(y, sum);
}

void backend_muon_apply(Tensor w, Tensor x, float keep, float rate, uint64_t seed, uint64_t first)
{
    check_muon_apply(w, x);
    float *wi = cpu_scratch(0, BLOCK), *xi = cpu_scratch(1, BLOCK);
    for (size_t at = 0, numel = tensor_numel(w); at < numel; at += BLOCK) {
        const size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        tensor_load(wi, w, at, n);
        tensor_load(xi, x, at, n);
        for (size_t i = 0; i < n; i++)
            wi[i] = keep * wi[i] - rate * xi[i];
        store_weights(w, at, wi, n, seed, first);
    }
}
