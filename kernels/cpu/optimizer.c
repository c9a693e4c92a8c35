/* AdamW with decoupled weight decay [Loshchilov & Hutter 2019, alg. 2]. FP8 moments: kernels/fp8.c. */
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/random.h"

enum { BLOCK = 4096 };

static void store_weights(Tensor w, size_t at, const float *x, size_t n, uint64_t seed, uint64_t first)
{
    if (w.format.dtype == BF16)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)w.data)[at + i] = bf16_round_stochastic(x[i], random_16(seed, first + at + i));
    else
        store(w, at, x, n);
}

static void step(float *w, float *m, float *v, const float *grad, size_t n, AdamW a)
{
    for (size_t i = 0; i < n; i++) {
        const float g = a.grad_scale * grad[i];
        m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
        v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
        const float update = m[i] / a.correction1 / (sqrtf(v[i] / a.correction2) + a.eps);
        w[i] -= a.lr * (update + a.weight_decay * w[i]);
    }
}

static void check_moment(const char *name, Tensor t, int n)
{
    check_tensor("adamw", name, t, 1, n);
    CHECK(!format_is_fp8(t.format) || (t.format.group && BLOCK % t.format.group == 0),
          "adamw: %s is %s; FP8 moments have groups whose size divides %d", name, format_name(t.format), BLOCK);
}

void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_TENSOR(w, 1, w.cols);
    CHECK_TENSOR(grad, 1, w.cols);
    CHECK_PLAIN(w);
    CHECK_PLAIN(grad);
    check_moment("m", m, w.cols);
    check_moment("v", v, w.cols);
    float *wi = scratch(0, BLOCK), *mi = scratch(1, BLOCK), *vi = scratch(2, BLOCK), *gi = scratch(3, BLOCK);
    for (size_t at = 0, numel = tensor_numel(w); at < numel; at += BLOCK) {
        size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        load(wi, w, at, n);
        load(gi, grad, at, n);
        load(mi, m, at, n);
        load(vi, v, at, n);
        step(wi, mi, vi, gi, n, a);
        store_weights(w, at, wi, n, a.seed, first);
        store(m, at, mi, n);
        store(v, at, vi, n);
    }
}
