/* Numbers in BF16 and FP8, and the scales of FP8. */
#pragma once
#include <string.h>

#include "kernels/tensor.h"

static inline float bf16_decode(uint16_t code)
{
    const uint32_t u = (uint32_t)code << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Rounds to nearest, ties to even. NaN becomes 0x7fff. */
static inline uint16_t bf16_encode(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return x != x ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float fp8_decode(uint8_t code, DType d);
/* rounds to nearest, ties to even; saturates, including infinities; NaN becomes 0x7f */
uint8_t fp8_encode(float x, DType d);
float fp8_max(DType d);               /* largest finite value: 448 or 57344 */
float fp8_scale(float amax, DType d); /* F32 scale S of a whole tensor */
float fp8_headroom(DType d);          /* the h of scale_is_reused: 2 or 8 */
/* S of a moment's group without expansion: BF16, rounded up */
uint16_t fp8_moment_scale(float amax, DType d);

/* Returns the S of a group of activations, in a byte. S is chosen so that the group's largest value
 * is almost exact. 255 stands for NaN. */
uint8_t fp8_group_scale(float amax, DType d);
float fp8_group_value(uint8_t scale, DType d);

/* Returns S and k of an expanded group in 32 bits. S has 24 bits: F32 without its sign and its last
 * 7 bits, rounded up. k has 8 bits, for 1/16 to 16. NOTE: because S is rounded up, a maximum that
 * decreases by less than the resolution of S does not decrease at all. S resolves the 2^-10 by
 * which a moment with beta2 = 0.999 decreases in a step. */
uint32_t fp8_pair(float amax, float k, DType d);
float fp8_pair_scale(uint32_t pair);
float fp8_pair_power(uint32_t pair);
/* Returns the expansion exponent k of a group with b <= |x| <= a. */
float fp8_expansion_power(float a, float b, DType d);

float abs_max(const float *x, size_t n); /* NaN counts as 0 */
