/* Moments in the registers of a warp, in FP8 groups of 128 [COAT sec. 4] or dense. adamw_fp8.cu and
 * muon.cu share this code. Eight threads share a group, with sixteen elements each. */
#pragma once
#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/vector.cuh"

enum { GROUP = 128, LANES = 8, HALF = GROUP / 2, THREADS = 256, MAX_K = 16, K_STEPS = 16 };

/* The format of a moment as a type: FP8 in groups, or dense (F32 or BF16). */
template <DType D, bool E>
struct Form {
    static constexpr DType dtype = D;
    static constexpr bool dense = D == F32 || D == BF16;
    static constexpr bool expand = E;
    static constexpr float log2_max = D == E4M3 ? 8.8073549f : 15.8073549f;
};

struct Moment {
    uint8_t *codes; /* FP8 codes, or values of a dense moment */
    void *scale;    /* per group: S, or S and k with expansion */
    float beta;     /* beta, or log2 of beta with expansion */
};

/* A thread's elements are eight of the first half of the group, and the eight at the same offset in
 * the second half. So neighbouring threads access whole sectors of memory in every format. */
struct Codes {
    uint2 half[2];
    uint32_t scale; /* S of the group; with expansion, fp8_pair of kernels/fp8.h */
};

__device__ static inline float pair_scale(uint32_t pair)
{
    return __uint_as_float((pair & 0xffffff) << 7);
}
__device__ static inline float pair_power(uint32_t pair)
{
    return (float)((pair >> 24) + 1) * (1.0f / K_STEPS);
}

template <class F>
__device__ static inline Codes load_codes(const Moment &t, unsigned at)
{
    Codes c;
    c.half[0] = *(const uint2 *)(t.codes + at);
    c.half[1] = *(const uint2 *)(t.codes + at + HALF);
    c.scale = F::expand ? ((const uint32_t *)t.scale)[at / GROUP]
                        : ((const uint16_t *)t.scale)[at / GROUP];
    return c;
}

/* A thread's elements of a dense moment. */
template <class F>
struct Dense {
    typedef std::conditional_t<F::dtype == F32, float, bf16> type;
    Pack<type> half[2];
};

template <class F>
__device__ static inline auto load_moment(const Moment &t, unsigned at)
{
    if constexpr (F::dense) {
        const typename Dense<F>::type *p = (const typename Dense<F>::type *)t.codes + at;
        return Dense<F>{ { load_pack<true>(p, 8), load_pack<true>(p + HALF, 8) } };
    } else
        return load_codes<F>(t, at);
}

/* Replaces x by 2^(a log2 |x| + b), with the sign of x if SIGNED. 0 stays 0. */
template <bool SIGNED>
__device__ static inline void raise(float (&x)[2][8], float a, float b)
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float &xi = x[i / 8][i % 8];
        const float y = exp2_quick(__fmaf_rn(a, log2_quick(fabsf(xi)), b));
        xi = SIGNED ? copysignf(y, xi) : y;
    }
}

/* Returns beta times the moment in x. The moment is sign(f) (|f|/max)^(1/k) S max, where f is the
 * value of a code. */
template <class F, bool SIGNED>
__device__ static inline void decode_moment(float (&x)[2][8], const Codes &c, float beta)
{
    const float scale = F::expand ? pair_scale(c.scale) : bf16_value((uint16_t)c.scale);
#pragma unroll
    for (int h = 0; h < 2; h++)
        decode_pack<F::dtype>(x[h], c.half[h], F::expand ? 1.0f : scale * beta);
    if (F::expand) {
        const float root = inverse_quick(pair_power(c.scale));
        raise<SIGNED>(x, root, log2_quick(scale) + (1.0f - root) * F::log2_max + beta);
    }
}

template <class F, bool SIGNED>
__device__ static inline void decode_moment(float (&x)[2][8], const Dense<F> &d, float beta)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        x[i / 8][i % 8] = d.half[i / 8][i % 8] * beta;
}

/* Returns the expansion exponent k of a group with b <= |x| <= a, a multiple of 1/16. |x|^k fills
 * the range of the format. */
template <class F>
__device__ static inline float expansion_power(float a, float b)
{
    constexpr float tiny = 1e-20f, range = 2 * F::log2_max - 1;
    const float ratio = log2_quick((a + tiny) * inverse_quick(b + tiny));
    const float steps =
        ratio > 0 ? floorf(range * K_STEPS * inverse_quick(ratio)) : (float)(MAX_K * K_STEPS);
    return fminf(fmaxf(steps, 1), MAX_K * K_STEPS) * (1.0f / K_STEPS);
}

__device__ static inline float group_max(float x)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

template <class F>
__device__ static inline void store_dense(const Moment &t, unsigned at, const float (&x)[2][8])
{
    typename Dense<F>::type *p = (typename Dense<F>::type *)t.codes + at;
    store_pack<true>(p, x[0], 8);
    store_pack<true>(p + HALF, x[1], 8);
}

/* Stores codes with the values f = sign(x) (|x|/a)^k max, where a = S max. All threads of a warp
 * must call this function; threads that are not `inside` store nothing. */
template <class F, bool SIGNED>
__device__ static inline void store_codes(const Moment &t, unsigned at, float (&x)[2][8],
                                          bool inside)
{
    const float a = group_max(fmaxf(pack_abs_max(x[0]), pack_abs_max(x[1])));
    uint32_t s = F::expand ? (__float_as_uint(fp8_scale(a, F::dtype)) + 0x7f) >> 7
                           : fp8_moment_scale(a, F::dtype);
    float inverse = 1.0f;
    if (F::expand) {
        float b = fabsf(x[0][0]);
#pragma unroll
        for (int i = 1; i < 16; i++)
            b = fminf(b, fabsf(x[i / 8][i % 8]));
        const float k = expansion_power<F>(a, -group_max(-b));
        raise<SIGNED>(x, k, (1.0f - k) * F::log2_max - k * log2_quick(pair_scale(s)));
        s |= (uint32_t)(k * K_STEPS - 1) << 24;
    } else
        inverse = 1.0f / bf16_value((uint16_t)s);
    if (!inside)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        *(uint2 *)(t.codes + at + h * HALF) = encode_pack<F::dtype>(x[h], inverse);
    if (threadIdx.x % LANES != 0)
        return;
    if (F::expand)
        ((uint32_t *)t.scale)[at / GROUP] = s;
    else
        ((uint16_t *)t.scale)[at / GROUP] = (uint16_t)s;
}

template <class F, bool SIGNED>
__device__ static inline void store_moment(const Moment &t, unsigned at, float (&x)[2][8],
                                           bool inside)
{
    if constexpr (!F::dense)
        store_codes<F, SIGNED>(t, at, x, inside);
    else if (inside)
        store_dense<F>(t, at, x);
}

/* Calls f(the Form of t). */
template <typename F>
static void with_dense_form(Tensor t, F f)
{
    if (t.format.dtype == F32)
        f(Form<F32, false>());
    else
        f(Form<BF16, false>());
}

template <typename F>
static void with_fp8_form(Tensor t, F f)
{
    with_bool(t.format.expand, [&](auto expand) {
        if (t.format.dtype == E4M3)
            f(Form<E4M3, decltype(expand)::value>());
        else
            f(Form<E5M2, decltype(expand)::value>());
    });
}
