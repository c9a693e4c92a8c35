/* FP8 in registers: scales and codes, eight elements at a time. The bits equal those of
 * kernels/fp8.c. */
#pragma once
#include <cfloat>
#include <cuda_fp8.h>

#include "kernels/cuda/vector.cuh"

template <DType D>
constexpr float FP8_MAX = D == E4M3 ? 448.0f : 57344.0f;
template <DType D>
constexpr __nv_fp8_interpretation_t FP8_KIND = D == E4M3 ? __NV_E4M3 : __NV_E5M2;

/* ---- scales: S = max|x| / max(format); kernels/fp8.c explains the scales of activation groups
 * -- */

__host__ __device__ inline float fp8_max(DType d)
{
    return d == E4M3 ? FP8_MAX<E4M3> : FP8_MAX<E5M2>;
}

/* The h in the comment on scale_is_reused. */
__host__ __device__ inline float fp8_headroom(DType d)
{
    return d == E4M3 ? 2.0f : 8.0f;
}

/* Returns the scale for max|x| = amax. A smaller amax counts as 2^-90, so that S times the smallest
 * code is a normal float. The division is correctly rounded: a product with 1/max, corrected once
 * by its remainder [Markstein 1990]. */
__device__ inline float fp8_scale(float amax, DType d)
{
    const float max = fp8_max(d), inverse = d == E4M3 ? 1 / 448.0f : 1 / 57344.0f,
                x = fmaxf(amax, 0x1p-90f);
    const float q = __fmul_rn(x, inverse);
    return isinf(x) ? x : __fmaf_rn(__fmaf_rn(-q, max, x), inverse, q);
}

/* Returns the BF16 bits of a moment's scale. The scale is rounded up, so that |x/S| <=
 * max(format). */
__device__ inline uint16_t fp8_moment_scale(float amax, DType d)
{
    return (uint16_t)((__float_as_uint(fp8_scale(amax, d)) + 0xffffu) >> 16);
}

__device__ inline float bf16_value(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}

/* Returns 1/s, correctly rounded, for s with up to 8 significant bits. The relative distance of 1/s
 * from the midpoint of two floats is at least 2^-33, and a Newton step from the hardware's
 * approximation has an error of 2^-45. NaN gives NaN. */
__device__ inline float inverse_of_few_bits(float s)
{
    const float r = inverse_quick(s);
    return __fmaf_rn(__fmaf_rn(-s, r, 1.0f), r, r);
}

/* Returns a group's scale in a byte. The quotient is correctly rounded as in fp8_scale. From 2^126
 * on, 1/head is not a normal float, but there only E matters. */
__device__ inline uint8_t fp8_group_scale(float amax, DType d)
{
    const int cut = d == E4M3 ? 20 : 21;
    const float units = d == E4M3 ? 64.0f : 32.0f, a = fmaxf(amax, 0x1p-10f);
    const uint32_t bits = __float_as_uint(a) & ~0u << cut,
                   E = ((bits + (d == E4M3 ? 1u << 20 : 0u)) >> 23) - 117;
    const float head = __uint_as_float(bits), inverse = inverse_of_few_bits(head),
                q = __fmul_rn(a, inverse);
    const float quotient = __fmaf_rn(__fmaf_rn(-q, head, a), inverse, q);
    const uint32_t j = (uint32_t)__float2int_rn(__fmaf_rn(quotient, units, -units)) & 7u;
    return (uint8_t)(amax <= FLT_MAX ? min(E << 3 | j, 254u) : 255u);
}

__device__ inline float fp8_group_value(uint8_t scale, DType d)
{
    const uint32_t exponent = (scale >> 3) + (d == E4M3 ? 109u : 102u), j = scale & 7u;
    return scale == 255 ? __uint_as_float(0x7fffffffu)
                        : __uint_as_float(exponent << 23 | j << (d == E4M3 ? 17 : 18));
}

/* ---- codes ----------------------------------------------------------------------------------- */

template <DType D>
__device__ inline float decode(uint8_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, FP8_KIND<D>)));
}

/* Rounds to nearest even and saturates. NaN gives 0x7f. */
template <DType D>
__device__ inline uint8_t encode(float x)
{
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, FP8_KIND<D>);
}

/* Decodes four codes. The first code is in the lowest byte. */
template <DType D>
__device__ inline void decode_four(float *x, uint32_t codes, float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const __half2_raw h =
            __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(codes >> 16 * i), FP8_KIND<D>);
        const float2 v = __half22float2(__half2(h));
        x[2 * i] = v.x * scale;
        x[2 * i + 1] = v.y * scale;
    }
}

/* inverse is 1/S. */
template <DType D>
__device__ inline uint32_t encode_four(const float *x, float inverse)
{
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0] * inverse, x[1] * inverse),
                                                  __NV_SATFINITE, FP8_KIND<D>);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x[2] * inverse, x[3] * inverse),
                                                   __NV_SATFINITE, FP8_KIND<D>);
    return low | high << 16;
}

template <DType D>
__device__ inline void decode_pack(float (&x)[8], uint2 codes, float scale)
{
    decode_four<D>(x, codes.x, scale);
    decode_four<D>(x + 4, codes.y, scale);
}

template <DType D>
__device__ inline uint2 encode_pack(const float (&x)[8], float inverse)
{
    return make_uint2(encode_four<D>(x, inverse), encode_four<D>(x + 4, inverse));
}

/* As above, with the format as a run-time argument. All threads take the same branch. */
__device__ inline uint2 encode_pack(const float (&x)[8], float inverse, DType d)
{
    return d == E4M3 ? encode_pack<E4M3>(x, inverse) : encode_pack<E5M2>(x, inverse);
}

__device__ inline void decode_pack(float (&x)[8], uint2 codes, float scale, DType d)
{
    if (d == E4M3)
        decode_pack<E4M3>(x, codes, scale);
    else
        decode_pack<E5M2>(x, codes, scale);
}

template <int N>
__device__ inline float pack_abs_max(const float (&x)[N])
{
    float a = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        a = fmaxf(a, fabsf(x[i]));
    return a;
}
