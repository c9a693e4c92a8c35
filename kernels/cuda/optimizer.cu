/* AdamW in one pass: a thread reads eight elements of w, m, v and the gradient, and writes the first three.
 *
 * Bytes per element: twice those of w, m and v, and once those of the gradient: 14 with everything in BF16, 22 with
 * F32 moments and BF16 weights and gradients, 26 with F32 weights too.
 *
 * The arithmetic is that of the specification, operation by operation: the intrinsics keep the compiler from fusing a
 * product with a sum, and the division and the square root below are correctly rounded. So weights and moments agree
 * with the CPU bit for bit.
 * NOTE: the compiler's own division and square root branch for rare exponents. With three and one of them per element
 * instructions, not memory, would be the limit. */
#include "kernels/cuda/vector.cuh"
#include "kernels/random.h"

enum { THREADS = 256 };

/* x / d from r, which is 1/d to an ulp: one step from a quotient that is off by an ulp or two to the correctly
 * rounded one, because the remainder is exact. [Markstein 1990] With |x| < 2^-100 remainders underflow, and the
 * last bit may be wrong. None of 2e8 random quotients differed from the compiler's. */
__device__ static inline float divide(float x, float d, float r)
{
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-q, d, x), r, q);
}

/* 1/d for divide: the hardware's approximation and a Newton step. d < 2^126. */
__device__ static inline float reciprocal(float d)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
}

/* The same for the square root. 0 <= x < inf; below 2^-126 the result is only known to be less than 2^-63. */
__device__ static inline float square_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaxf(x, 0x1p-126f)));
    const float root = __fmul_rn(x, y);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

struct Step {
    AdamW a;
    float rest1, rest2;                 /* 1 - beta1, 1 - beta2              */
    float inverse1, inverse2;           /* 1 / correction1, 1 / correction2  */
};

__device__ static inline void update(float &w, float &m, float &v, float grad, const Step &s)
{
    const float g = __fmul_rn(s.a.grad_scale, grad);
    m = __fadd_rn(__fmul_rn(s.a.beta1, m), __fmul_rn(s.rest1, g));
    v = __fadd_rn(__fmul_rn(s.a.beta2, v), __fmul_rn(__fmul_rn(s.rest2, g), g));
    const float below = __fadd_rn(square_root(divide(v, s.a.correction2, s.inverse2)), s.a.eps);
    const float ratio = divide(divide(m, s.a.correction1, s.inverse1), below, reciprocal(below));
    w = __fsub_rn(w, __fmul_rn(s.a.lr, __fadd_rn(ratio, __fmul_rn(s.a.weight_decay, w))));
}

/* random_16 of elements i .. i + 7; four share one hash. */
__device__ static inline void random_pack(uint32_t (&r)[8], uint64_t seed, uint64_t i)
{
    if (i % 4 == 0) {
        const uint64_t bits[2] = { random_bits(seed, i / 4), random_bits(seed, i / 4 + 1) };
#pragma unroll
        for (int k = 0; k < 8; k++)
            r[k] = (uint32_t)(bits[k / 4] >> 16 * (k % 4)) & 0xffffu;
    } else
#pragma unroll 1
        for (int k = 0; k < 8; k++)
            r[k] = random_16(seed, i + k);
}

template <bool ALIGNED>
__device__ static inline void store_weights(float *w, const float (&x)[8], int left, uint64_t, uint64_t)
{
    store_pack<ALIGNED>(w, x, left);
}

template <bool ALIGNED>
__device__ static inline void store_weights(bf16 *w, const float (&x)[8], int left, uint64_t seed, uint64_t i)
{
    float rounded[8];                   /* BF16 values, which the store leaves as they are */
    uint32_t r[8];
    random_pack(r, seed, i);
#pragma unroll
    for (int k = 0; k < 8; k++)
        rounded[k] = __uint_as_float((uint32_t)bf16_round_stochastic(x[k], r[k]) << 16);
    store_pack<ALIGNED>(w, rounded, left);
}

template <bool ALIGNED, typename TW, typename TM, typename TV, typename TG>
__device__ static inline void update_pack(TW *w, TM *m, TV *v, const TG *grad, int left, const Step &s,
                                          uint64_t number)
{
    const Pack<TW> wp = load_pack<ALIGNED>((const TW *)w, left);
    const Pack<TM> mp = load_pack<ALIGNED>((const TM *)m, left);
    const Pack<TV> vp = load_pack<ALIGNED>((const TV *)v, left);
    const Pack<TG> gp = load_pack<ALIGNED>(grad, left);
    float wx[8], mx[8], vx[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        wx[k] = wp[k], mx[k] = mp[k], vx[k] = vp[k];
        update(wx[k], mx[k], vx[k], gp[k], s);
    }
    store_weights<ALIGNED>(w, wx, left, s.a.seed, number);
    store_pack<ALIGNED>(m, mx, left);
    store_pack<ALIGNED>(v, vx, left);
}

template <bool ALIGNED, typename TW, typename TM, typename TV, typename TG> __global__ __launch_bounds__(THREADS)
void adamw_kernel(TW *w, TM *m, TV *v, const TG *grad, size_t n, Step s, uint64_t first)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (ALIGNED && at + 8 <= n)
        update_pack<true>(w + at, m + at, v + at, grad + at, 8, s, first + at);
    else if (at < n)
        update_pack<false>(w + at, m + at, v + at, grad + at, (int)min(n - at, (size_t)8), s, first + at);
}

void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_DENSE(w, 1, w.cols);
    CHECK_DENSE(m, 1, w.cols);
    CHECK_DENSE(v, 1, w.cols);
    CHECK_DENSE(grad, 1, w.cols);
    const size_t n = tensor_numel(w);
    if (n == 0)
        return;
    const unsigned blocks = (unsigned)ceil_div(n, 8 * THREADS);
    const Step s = { a, 1 - a.beta1, 1 - a.beta2, 1 / a.correction1, 1 / a.correction2 };
    const bool aligned = is_aligned(w, 8) && is_aligned(m, 8) && is_aligned(v, 8) && is_aligned(grad, 8);
    with_bool(aligned, [&](auto is_aligned) {
        with_type(w, [&](auto *wp) {
            with_type(m, [&](auto *mp) {
                with_type(v, [&](auto *vp) {
                    with_type(grad, [&](auto *gp) {
                        adamw_kernel<decltype(is_aligned)::value><<<blocks, THREADS, 0, device_stream()>>>(
                            wp, mp, vp, gp, n, s, first);
                    });
                });
            });
        });
    });
    LAUNCH_CHECK();
}
