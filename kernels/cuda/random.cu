/* Initial weights, computed once. A thread computes eight elements. The normal numbers follow the
 * specification (random.h, in F64), with a few hundred operations each. So the arithmetic limits
 * the speed; the 2 bytes per element in BF16 do not. */
#include "kernels/cuda/vector.cuh"
#include "kernels/random.h"

enum { THREADS = 256 };

struct Normal {
    double std, cutoff;
    uint64_t seed, first;
};

/* Stores elements at .. at + 7 of n. After the last whole pack, or if w is not aligned, it stores
 * them one by one. */
__device__ static inline void store_flat(AnyOut w, size_t at, const float (&x)[8], size_t n,
                                         bool aligned)
{
    if (aligned && at + 8 <= n)
        store_any<true>(w, at, x, 8);
    else
        store_any<false>(w, at, x, (int)min(n - at, (size_t)8));
}

__global__ __launch_bounds__(THREADS) void init_normal_kernel(AnyOut w, size_t n, Normal normal,
                                                              bool aligned)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= n)
        return;
    float x[8];
#pragma unroll 1
    for (int i = 0; i < 8; i++)
        x[i] =
            (float)(normal.std * random_normal(normal.seed, normal.first + at + i, normal.cutoff));
    store_flat(w, at, x, n, aligned);
}

__global__ __launch_bounds__(THREADS) void init_constant_kernel(AnyOut w, size_t n, float value,
                                                                bool aligned)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= n)
        return;
    const float x[8] = { value, value, value, value, value, value, value, value };
    store_flat(w, at, x, n, aligned);
}

void backend_init_normal(Tensor w, float std, float cutoff, uint64_t seed, uint64_t first)
{
    CHECK_DENSE(w, w.rows, w.cols);
    const size_t n = tensor_numel(w);
    if (n == 0)
        return;
    init_normal_kernel<<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0, device_stream()>>>(
        any_out(w), n, Normal{ std, cutoff, seed, first }, is_aligned(w, 8));
    LAUNCH_CHECK();
}

void backend_init_constant(Tensor w, float value)
{
    CHECK_DENSE(w, w.rows, w.cols);
    const size_t n = tensor_numel(w);
    if (n == 0)
        return;
    init_constant_kernel<<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0, device_stream()>>>(
        any_out(w), n, value, is_aligned(w, 8));
    LAUNCH_CHECK();
}
