/* The three products of an adapter [Hu et al. 2021, arXiv 2106.09685], by OpenBLAS in F32.
 * OpenBLAS's threads never split a sum (matmul.c). */
#include <cblas.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* One part of a LoraMatrix. The part maps between the columns of the wide tensor from `first` on
 * and the columns of xa from `xa` on. Element (c,j) is w[c * ld + j], or w[j * ld + c] if
 * transposed. */
typedef struct {
    float *w;
    bool transposed;
    int ld, first, width, xa;
} Block;

/* Returns part i of m, whose values are w. r: rank of a part. */
static Block block_of(LoraMatrix m, float *w, int i, int r)
{
    if (!m.is_b)
        return (Block){ w, true, m.w.cols, 0, m.w.cols, 0 };
    int row = 0;
    for (int k = 0; k < i; k++)
        row += m.projection[k].width;
    return (Block){ w + (size_t)row * (size_t)r, false, r, m.projection[i].first,
                    m.projection[i].width,       i * r };
}

void backend_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale)
{
    const int N = x.rows, C = x.cols, r = check_lora_narrow(xa, x, m);
    const float *input = tensor_values(x, 0);
    float *w = tensor_values(m.w, 1), *output = tensor_result(xa, 2);
    for (int i = 0; i < m.num_projections; i++) {
        const Block b = block_of(m, w, i, r);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans, N, r,
                    b.width, scale, input + b.first, C, b.w, b.ld, 0, output + b.xa, xa.cols);
    }
    tensor_finish(xa, output);
}

void backend_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add)
{
    const int N = y.rows, C = y.cols, r = check_lora_widen(y, xa, m, add);
    const float *input = tensor_values(xa, 0), *start = tensor_values(add, 1);
    float *w = tensor_values(m.w, 2), *output = tensor_result(y, 3);
    if (!start)
        memset(output, 0, tensor_numel(y) * sizeof *output);
    else if (start != output)
        memcpy(output, start, tensor_numel(y) * sizeof *output);
    for (int i = 0; i < m.num_projections; i++) {
        const Block b = block_of(m, w, i, r);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, b.transposed ? CblasNoTrans : CblasTrans, N,
                    b.width, r, 1, input + b.xa, xa.cols, b.w, b.ld, 1, output + b.first, C);
    }
    tensor_finish(y, output);
}

void backend_lora_dw(LoraMatrix dm, Tensor xa, Tensor x)
{
    if (!dm.w.data)
        return;
    const int N = x.rows, C = x.cols, r = check_lora_dw(dm, xa, x);
    const float *narrow = tensor_values(xa, 0), *wide = tensor_values(x, 1);
    float *output = dm.w.empty ? tensor_result(dm.w, 2) : tensor_values(dm.w, 2);
    const float beta = dm.w.empty ? 0 : 1;
    for (int i = 0; i < dm.num_projections; i++) {
        const Block b = block_of(dm, output, i, r);
        if (b.transposed)
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, r, b.width, N, 1, narrow + b.xa,
                        xa.cols, wide + b.first, C, beta, b.w, b.ld);
        else
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, b.width, r, N, 1, wide + b.first,
                        C, narrow + b.xa, xa.cols, beta, b.w, b.ld);
    }
    tensor_finish(dm.w, output);
}
