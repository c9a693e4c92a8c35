/* FP8 by search: the reference of the encoders. Nothing here shares an idea with them: values come from a table of
 * all codes, and a number is encoded as the nearest of them, in double. */
#pragma once
#include "tests/kit.h"

/* Code of the largest finite value. */
static inline int fp8_last(DType d)
{
    return d == E4M3 ? 0x7e : 0x7b;
}

static inline const double *fp8_table(DType d)
{
    static double table[2][256];
    if (table[d == E5M2][1] == 0)
        for (int c = 0; c < 256; c++)
            table[d == E5M2][c] = decode_fp8((uint8_t)c, d);
    return table[d == E5M2];
}

/* Codes 0 .. last are in ascending order of value. Of two equally near ones the even code has the even mantissa. */
static inline uint8_t fp8_nearest(double x, DType d)
{
    const double *value = fp8_table(d), a = fabs(x);
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    int low = 0, high = fp8_last(d);
    if (isnan(x))
        return 0x7f;
    if (a >= value[high])
        return sign | (uint8_t)high;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (value[middle] <= a)
            low = middle;
        else
            high = middle;
    }
    double below = a - value[low], above = value[high] - a;     /* exact: both are multiples of a's last place */
    return sign | (uint8_t)(below < above || (below == above && low % 2 == 0) ? low : high);
}
