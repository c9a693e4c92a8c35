/* Conversion of numbers to FP8 and back, bit for bit.
 *
 * The formats [Micikevicius et al. 2022, arXiv 2209.05433, tab. 1]: value = 2^(e - bias) 1.m, or
 * 2^(1 - bias) 0.m if e = 0.
 *            bits s/e/m  bias  largest          smallest normal  smallest   special
 *     E4M3   1/4/3       7     448   (0x7e)     2^-6             2^-9       0x7f NaN; no infinity
 *     E5M2   1/5/2       15    57344 (0x7b)     2^-14            2^-16      0x7c infinity, 0x7d .. 0x7f NaN
 *
 * Without expansion x = S code. With expansion a group is stretched to the range of the format by a
 * power [COAT, sec. 4]. With a = max|x| and b = min|x| over the group,
 *     k = floor(16 log2(R) / log2(a/b)) / 16, R = max^2/2: the dynamic range that the format's codes cover,
 *     code = Q(sign(x) (|x|/a)^k max),    x = sign(code) (|code|/max)^(1/k) a.
 * DIFFERS: the paper stores S, k and c = sqrt(a b), with f(x) = (|x|/c)^k and S = (a/c)^k / max. c
 * cancels in f(x)/S = (|x|/a)^k max, so two numbers suffice. A group stores S and k in 32 bits
 * (fp8.h, fp8_pair). S = a/max has 24 bits and is rounded up; a is read back as S max. k is a
 * multiple of 1/16 up to 16, so k is exact.
 *
 * A group of activations has its scale in a byte: 5 bits E, then 3 bits j. With M mantissa bits of
 * the code,
 *     S = 2^(E - 18) (1 + j/64) for E4M3, 2^(E - 25) (1 + j/32) for E5M2: units of j are 2^-(M+3).
 * The code of the largest value a has the first M digits of a, and S has the digits after them.
 * With h = a cut to M mantissa bits, j = (a - h) / h in these units, so a/S lies within 2^-(M+4) of
 * a code. For any S the other values keep the precision of a float code. Because S contains a power
 * of two, less than a binade of the largest codes is unused. DIFFERS: COAT's scales of activations
 * are BF16, so a group takes 18 bytes; here it takes 17. The squared errors of groups of 16 normal,
 * Laplace, Student (3), SiLU-times-normal and log-normal numbers are 1.01 to 1.04 times those with
 * BF16 scales for E4M3, and 1.01 to 1.05 times for E5M2. With powers of two as scales, which do not
 * favour a, they are 1.4 to 2.8 times those with BF16 scales. */
#include "kernels/fp8.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { MAX_K = 16, K_STEPS = 16 };

/* The lower limit of max|x|. The limit makes S and S * (smallest code) normal floats: 2^-90 /
 * 57344 * 2^-16 > 2^-122. */
#define AMAX_MIN 0x1p-90f

/* The lower limit of max|x| for a group whose scale is a byte. At this limit E = 0. */
#define GROUP_AMAX_MIN 0x1p-10f

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

float fp8_decode(uint8_t code, DType d)
{
    int mantissa_bits = d == E4M3 ? 3 : 2, bias = d == E4M3 ? 7 : 15;
    int e = (code & 0x7f) >> mantissa_bits, m = code & ((1 << mantissa_bits) - 1);
    float x;
    if (d == E4M3 ? (code & 0x7f) == 0x7f : e == 31)
        x = d == E5M2 && m == 0 ? INFINITY : NAN;
    else if (e == 0)
        x = ldexpf((float)m, 1 - bias - mantissa_bits);
    else
        x = ldexpf((float)(m + (1 << mantissa_bits)), e - bias - mantissa_bits);
    return code & 0x80 ? -x : x;
}

/* For a normal result, takes the float's bits with the exponent re-biased, and cuts them after the
 * remaining mantissa bits. Before the cut, it adds half of the last kept place, less one bit of the
 * float if the last kept bit is even. This rounds to nearest, ties to even. A carry out of the
 * mantissa increments the exponent. A subnormal result is a number of units of the smallest value.
 * This unit is the last place of the float 2^(24 - bias - mantissa_bits). 2^mantissa_bits units are
 * the first normal code. */
uint8_t fp8_encode(float x, DType d)
{
    const int mantissa_bits = d == E4M3 ? 3 : 2, bias = d == E4M3 ? 7 : 15,
              cut = 23 - mantissa_bits;
    const float smallest_normal = d == E4M3 ? 0x1p-6f : 0x1p-14f,
                counter = d == E4M3 ? 0x1p14f : 0x1p7f, a = fabsf(x);
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x))
        return 0x7f;
    if (a >= fp8_max(d))
        return sign | (d == E4M3 ? 0x7e : 0x7b);
    if (a < smallest_normal)
        return sign | (uint8_t)(bits_of(a + counter) - bits_of(counter));
    uint32_t u = bits_of(a) - ((uint32_t)(127 - bias) << 23);
    u += (1u << (cut - 1)) - 1 + (u >> cut & 1);
    return sign | (uint8_t)(u >> cut);
}

float fp8_max(DType d)
{
    return d == E4M3 ? 448 : 57344;
}

/* S = max|x| / max(format). If the maximum is infinite, S is inf and x/S is 0 or NaN, so all values
 * are read back as NaN. With expansion, infinite values are read back as NaN, and all others as 0.
 * Training skips a step with such values. */
float fp8_scale(float amax, DType d)
{
    return fmaxf(amax, AMAX_MIN) / fp8_max(d);
}

/* E5M2 is for gradients, whose maxima vary more between micro-batches, and E5M2 has binades to
 * spare. So its headroom is larger. */
float fp8_headroom(DType d)
{
    return d == E4M3 ? 2 : 8;
}

/* S is rounded up, so |x/S| <= max(format), except for the last bits of 1/S and of the product.
 * Rounding to a code removes these bits. */
uint16_t fp8_moment_scale(float amax, DType d)
{
    uint32_t u = bits_of(fp8_scale(amax, d));
    return (uint16_t)((u + 0xffff) >> 16);
}

/* E is the maximum's exponent minus the exponent of 2^-10, so the maximum's code is in the largest
 * binade. But 480 = 2^8 1.875 is NaN in E4M3, so a maximum with these digits takes the next E and
 * the code of 240. j rounds to 8 only if h is a power of two and a is just below the next code.
 * Then j becomes 0, and a gets the next code. Values above the largest code exceed it by less than
 * 2^-(M+4), and saturate. Maxima above 4e6 have the largest S, 254. An infinite maximum makes the
 * whole group NaN when it is read. Training skips that step. */
uint8_t fp8_group_scale(float amax, DType d)
{
    const int mantissa_bits = d == E4M3 ? 3 : 2, cut = 23 - mantissa_bits;
    if (!(amax <= FLT_MAX))
        return 255;
    const float a = fmaxf(amax, GROUP_AMAX_MIN);
    const uint32_t head = bits_of(a) >> cut << cut;
    const uint32_t j = (uint32_t)rintf((a / float_of(head) - 1) * (float)(8 << mantissa_bits)) & 7;
    const uint32_t E = ((head + (d == E4M3 ? 1u << cut : 0)) >> 23) -
                       (bits_of(GROUP_AMAX_MIN) >> 23),
                   scale = E << 3 | j;
    return (uint8_t)(scale < 254 ? scale : 254);
}

float fp8_group_value(uint8_t scale, DType d)
{
    const uint32_t exponent = (uint32_t)(scale >> 3) + 127 - (d == E4M3 ? 18 : 25), j = scale & 7;
    return scale == 255 ? NAN : float_of(exponent << 23 | j << (d == E4M3 ? 17 : 18));
}

uint32_t fp8_pair(float amax, float k, DType d)
{
    return (bits_of(fp8_scale(amax, d)) + 0x7f) >> 7 | ((uint32_t)(k * K_STEPS) - 1) << 24;
}

float fp8_pair_scale(uint32_t pair)
{
    return float_of((pair & 0xffffff) << 7);
}

float fp8_pair_power(uint32_t pair)
{
    return (float)((pair >> 24) + 1) / K_STEPS;
}

/* NOTE: the arithmetic is in double, so that the floor does not depend on the log2 of a back
 * end. */
float fp8_expansion_power(float a, float b, DType d)
{
    const float tiny = 1e-20f;
    const double range = (double)fp8_max(d) * fp8_max(d) / 2;
    double ratio = log2((double)(a + tiny) / (double)(b + tiny));
    double steps = ratio > 0 ? floor(log2(range) / ratio * K_STEPS) : MAX_K * K_STEPS;
    return (float)fmin(fmax(steps, 1), MAX_K * K_STEPS) / K_STEPS;
}

float abs_max(const float *x, size_t n)
{
    float a = 0;
    for (size_t i = 0; i < n; i++)
        a = fabsf(x[i]) > a ? fabsf(x[i]) : a;
    return a;
}
