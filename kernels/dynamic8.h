/* The 8-bit moments of bitsandbytes [Dettmers et al. 2022, arXiv 2110.02861, sec. 2 and app. F;
 * bitsandbytes 0.50]: a code names one of the 256 values of a map, and a group of 256 shares the
 * scale max|x|, an F32: x = scale map[code].
 *
 * The maps are dynamic: they have seven decades below 1. The highest decade has half of all values.
 * Each lower decade has half as many values as the decade above it. DYNAMIC8 is for m: code 127 is
 * 0, codes 128 + i and 126 - i have opposite values, and code 255 is 1. There is no code for -1.
 * UDYNAMIC8 is for v: code 0 is 0, and code 255 is 1.
 *
 * The code of x is the code of the value nearest to x (1 / max|x|). The product and the quotient
 * are rounded to F32. The midpoint of two values is rounded to F32 too, and gets the even code. NaN
 * counts as 0. A negative number, including -0, gets code 126 at most, never 127 (0), so that it
 * keeps its sign. (bitsandbytes does this in the update of m. Positive numbers may become 0.) In
 * UDYNAMIC8 a positive x below 1.6e-7 max|x|, half of the smallest value, becomes 0. NOTE: the v of
 * a rare gradient becomes 0 in this way; its m does not.
 *
 * DIFFERS: in a group of zeros bitsandbytes divides 0 by 0, and the code of the result depends on
 * the back end. Here all codes of such a group are the code of 0. All codes are also the code of 0
 * if 1 / max|x| is not a normal float, which means max|x| < 2^-126 or >= 2^126. */
#pragma once
#include "kernels/kernels.h"
#include "kernels/random.h"

const float *dynamic8_map(DType d); /* 256 values, ascending, indexed by code */
/* 1 / absmax, or 0 if all codes of the group are the code of 0, as explained above */
float dynamic8_inverse(float absmax);
uint8_t dynamic8_encode(float x, DType d); /* the code of x = m (1 / max|m|) */

/* Returns the code of the map's value nearest to x, without the rule for negative numbers. NaN
 * gives the code of 0. */
HOST_DEVICE static inline uint8_t dynamic8_nearest(const float *map, float x)
{
    int low = 0, high = 255;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (x > map[middle])
            low = middle;
        else
            high = middle;
    }
    const float between = (map[low] + map[high]) * 0.5f;
    return (uint8_t)(x > between || (x == between && low % 2 == 1) ? high : low);
}

/* tensor_load and tensor_store of values.h for tensors in a dynamic map. */
void dynamic8_load(float *x, Tensor t, size_t first, size_t n);
void dynamic8_store(Tensor t, size_t first, const float *x, size_t n);

/* ---- the search as a table ------------------------------------------------------------------- */

/* The rank of |x| is the number of values of the map between 0 and the value nearest to |x|. The
 * rank grows with the bits of the float, at most once among floats with the same upper 16 bits. So
 * one entry per upper half is enough: the third byte of bits + steps[(bits >> 16) - DYNAMIC8_FIRST]
 * is the rank. The table covers floats from 2^-23 to 1 + 2^-7. Smaller floats have rank 0. */
enum { DYNAMIC8_FIRST = 0x3400, DYNAMIC8_STEPS = 0x3f80 - DYNAMIC8_FIRST + 1 };

void dynamic8_steps(uint32_t steps[DYNAMIC8_STEPS], DType d);

/* Computes four codes of DYNAMIC8 from four ranks. `negative` has 0xff in the bytes of negative
 * numbers. The rank of a negative number is at least 1. Rank 128 becomes 127 for negative numbers,
 * because there is no code for -1. */
HOST_DEVICE static inline uint32_t dynamic8_codes(uint32_t ranks, uint32_t negative)
{
    const uint32_t zero = 0x7f7f7f7fu;
    ranks -= ranks >> 7 & negative & 0x01010101u;
    return (ranks ^ (negative & zero)) + (zero & ~negative);
}

/* ---- constants of a step of adamw8bit -------------------------------------------------------- */

typedef struct {
    float grad_scale, beta1, beta2;
    float rest1, rest2; /* 1 - beta1, 1 - beta2 */
    float rate;         /* -lr sqrt(c2) / c1 */
    float eps;          /* sqrt(c2) eps */
    float keep;         /* 1 - lr weight_decay */
} Dynamic8Step;

Dynamic8Step dynamic8_step(AdamW a);
