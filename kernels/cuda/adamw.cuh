/* One element's AdamW update, for moments in any format, and the rounding of the weights.
 *
 * The arithmetic follows the specification operation by operation. The intrinsics keep the compiler
 * from fusing a product with a sum, and the division and the square root below are correctly
 * rounded. So F32 and BF16 weights and moments agree with the CPU bit for bit. NOTE: the compiler's
 * own division and square root contain branches for rare exponents. With three such divisions and
 * one such root per element, the instruction rate would limit the speed instead of the memory
 * bandwidth. */
#pragma once
#include "kernels/cuda/vector.cuh"
#include "kernels/random.h"

/* Computes x / d from r, which is 1/d with an error of at most an ulp. The quotient x r has an
 * error of an ulp or two. One correction step rounds it correctly, because the remainder is exact
 * [Markstein 1990]. If |x| < 2^-100, remainders underflow, and the last bit may be wrong. None of
 * 2e8 random quotients differed from the compiler's. */
__device__ static inline float divide(float x, float d, float r)
{
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-q, d, x), r, q);
}

/* Computes 1/d for `divide`: the hardware's approximation, then a Newton step. d must be below
 * 2^126. */
__device__ static inline float reciprocal(float d)
{
    const float r = inverse_quick(d);
    return __fmaf_rn(__fmaf_rn(-d, r, 1.0f), r, r);
}

/* Computes the square root of x, 0 <= x < inf, with a Newton step after the hardware's
 * approximation. For x < 2^-126 the result is below 2^-63, but may be inexact. */
__device__ static inline float square_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaxf(x, 0x1p-126f)));
    const float root = __fmul_rn(x, y);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(0.5f, y), root);
}

struct Step {
    AdamW a;
    float rest1, rest2;       /* 1 - beta1, 1 - beta2 */
    float inverse1, inverse2; /* 1 / correction1, 1 / correction2 */
    uint64_t sequence;        /* random_sequence(seed) */
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

/* Computes bf16_round_stochastic of x[0..7], the elements from number i on; i is a multiple of 4.
 * Returns two BF16 per word. A dot product of 16-bit halves with bytes, one of which is 1, adds 16
 * random bits in one instruction. A byte permutation picks two upper halves. The sum is right for
 * infinities too, but may turn NaN into a number. So any_nan, a running sum of products of the
 * elements, shows whether some element is NaN. In rare cases any_nan is NaN although no element is
 * NaN; this costs only time. */
__device__ static inline uint4 round_pack(const float (&x)[8], uint64_t sequence, uint64_t i)
{
    const uint64_t bits[2] = { random_bits_of(sequence, i / 4),
                               random_bits_of(sequence, i / 4 + 1) };
    uint32_t sum[8];
    float any_nan = 0;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const uint32_t r = (uint32_t)(bits[k / 4] >> 16 * (k % 4));
        sum[k] = __dp2a_lo(r, 0x0001u, __float_as_uint(x[k]));
        sum[k + 1] = __dp2a_lo(r, 0x0100u, __float_as_uint(x[k + 1]));
        any_nan = __fmaf_rn(x[k], x[k + 1], any_nan);
    }
    if (isnan(any_nan))
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (isnan(x[k]))
                sum[k] = 0x7fff0000u;
    return make_uint4(__byte_perm(sum[0], sum[1], 0x7632), __byte_perm(sum[2], sum[3], 0x7632),
                      __byte_perm(sum[4], sum[5], 0x7632), __byte_perm(sum[6], sum[7], 0x7632));
}

__device__ static inline void store_weights(float *w, const float (&x)[8], uint64_t, uint64_t)
{
    store_pack(w, x, 8);
}

/* Stores x[0..7] in w, rounded stochastically. i: number of x[0], a multiple of 4. */
__device__ static inline void store_weights(bf16 *w, const float (&x)[8], uint64_t sequence,
                                            uint64_t i)
{
    *(uint4 *)w = round_pack(x, sequence, i);
}

/* Returns the number of element `at`. `at` is a multiple of 4, as widths and starts of numbering
 * are. */
__device__ static inline uint64_t number_of(uint64_t first, unsigned at, const Numbering &p)
{
    return first + at + (p.width ? (p.start + at) / p.width * p.skip : 0);
}

static inline void check_numbers(const char *op, uint64_t first, const Numbering &p)
{
    CHECK(first % 4 == 0 && p.width % 8 == 0 && p.start % 8 == 0 && p.skip % 4 == 0,
          "%s: first is %llu, parts of rows are %u wide from %u on; expected multiples of 4 and of "
          "8, because four elements share random bits and eight are in one row",
          op, (unsigned long long)first, p.width, p.start);
}

static inline Step make_step(AdamW a)
{
    return {
        a, 1 - a.beta1, 1 - a.beta2, 1 / a.correction1, 1 / a.correction2, random_sequence(a.seed)
    };
}

/* adamw_fp8.cu: AdamW with one or two moments in FP8 groups */
void adamw_fp8(Tensor w, Tensor m, Tensor v, Tensor grad, const AdamW &a, uint64_t first);
