#include "model/checkpoint/weight_codes.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/fp8.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/convert.h"

#define ZERO_SCALE 0x1p-7f /* BF16's epsilon, as in llm-compressor */

static float largest(const float *w, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(w[i]) > most ? fabsf(w[i]) : most;
    return most;
}

static float scale_of(float most, float largest_code, bool rounded)
{
    const float s = most / largest_code, stored = rounded ? bf16_decode(bf16_encode(s)) : s;
    return stored >= FLT_MIN ? stored : ZERO_SCALE;
}

/* ---- E4M3 ------------------------------------------------------------------------------------ */

void codes_fp8(uint8_t *codes, float *scale, const float *w, size_t rows, size_t cols, size_t high,
               size_t wide, bool rounded)
{
    for (size_t row = 0; row < rows; row += high)
        for (size_t col = 0; col < cols; col += wide, scale++) {
            const size_t end = rows - row < high ? rows : row + high,
                         n = cols - col < wide ? cols - col : wide;
            float most = 0;
            for (size_t r = row; r < end; r++)
                most = fmaxf(most, largest(w + r * cols + col, n));
            *scale = scale_of(most, fp8_max(E4M3), rounded);
            for (size_t r = row; r < end; r++)
                for (size_t i = r * cols + col; i < r * cols + col + n; i++)
                    codes[i] = fp8_encode(w[i] / *scale, E4M3);
        }
}

/* ---- integers -------------------------------------------------------------------------------- */

/* Rounds to nearest, ties to even, for |x| < 2^22. NOTE: rintf is a slow call unless the target has
 * an instruction for it. */
static inline float nearest(float x)
{
    const float shift = 0x1.8p23f;
    return (x + shift) - shift;
}

static inline float within(float x, float low, float high)
{
    return x < low ? low : x > high ? high : x;
}

void codes_int8(int8_t *codes, float *scale, const float *w, size_t rows, size_t cols)
{
    for (size_t r = 0; r < rows; r++, w += cols, codes += cols) {
        scale[r] = scale_of(largest(w, cols), 127.5f, true);
        for (size_t i = 0; i < cols; i++)
            codes[i] = (int8_t)within(nearest(w[i] / scale[r]), -128, 127);
    }
}

void codes_int8_llm(int8_t *codes, float *most, float *w, size_t rows, size_t cols)
{
    for (size_t r = 0; r < rows; r++, w += cols, codes += cols) {
        convert_encode(w, "F16", w, cols);
        /* from the end, because a float overwrites two codes, which must have been decoded
         * already */
        for (size_t i = cols; i-- > 0;)
            convert_decode(&w[i], "F16", (const uint16_t *)w + i, 1);
        most[r] = largest(w, cols);
        const float factor = most[r] > 0 ? 127 / most[r] : 0;
        for (size_t i = 0; i < cols; i++)
            codes[i] = (int8_t)nearest(w[i] * factor);
    }
}

void codes_int4(int8_t *codes, const float *scale, const float *w, size_t rows, size_t cols,
                size_t group)
{
    CHECK(cols % group == 0, "rows of %zu elements in groups of %zu", cols, group);
    for (size_t i = 0; i < rows * cols; i++)
        codes[i] = (int8_t)within(nearest(w[i] / scale[i / group]), -8, 7);
}

void codes_int4_pack(uint32_t *packed, const int8_t *codes, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        uint32_t word = 0;
        for (size_t k = 0; k < 8; k++)
            word |= (uint32_t)(codes[i + k] + 8) << 4 * k;
        packed[i / 8] = word;
    }
}

/* ---- the scale of a group of 4-bit codes ----------------------------------------------------- */

/* number of scales to try; number of elements between two comparisons of the sum */
enum { STEPS = 80, STEP_VALUES = 32 };

static inline int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns x^1.2 for 2^-100 < x < 2^100, with a relative error below 3e-5: enough to compare sums. x
 * = 2^e m, 1 <= m < 2; log2 x = e + log2 m; p = 1.2 log2 x = whole + f, 2^p = 2^whole 2^f. log2 m
 * and 2^f are nearly minimax polynomials. */
static inline float power(float x)
{
    const int32_t bits = bits_of(x);
    const float e = (float)((bits >> 23) - 127), m = float_of((bits & 0x7fffff) | 0x3f800000);
    const float log2_m =
        -2.79415368f +
        m * (5.06975632f +
             m * (-3.52021884f + m * (1.61017755f + m * (-0.40947559f + m * 0.04392863f))));
    const float p = 1.2f * (e + log2_m), whole = nearest(p - 0.5f), f = p - whole;
    return float_of(((int32_t)whole + 127) << 23) *
           (1.0000036f +
            f * (0.69296955f + f * (0.24162132f + f * (0.05171774f + f * 0.01368398f))));
}

/* Returns |x - code|^2.4. NOTE: with float comparisons or powf the compiler would not vectorize the
 * loops that call this. */
static inline float error_of(float x)
{
    int32_t code = (int32_t)nearest(x);
    code = code < -8 ? -8 : code;
    code = code > 7 ? 7 : code;
    const float e = x - (float)code;
    return power(e * e + 0x1p-99f);
}

/* Returns the sum of |w / scale - code|^2.4. Stops early if the partial sum exceeds `enough`. */
static inline __attribute__((always_inline)) float sum_of_errors(const float *restrict w, size_t n,
                                                                 float inverse, float enough)
{
    float sum = 0;
    for (size_t at = 0; at < n && sum <= enough; at += STEP_VALUES) {
        float part[STEP_VALUES];
        for (int i = 0; i < STEP_VALUES; i++)
            part[i] = error_of(w[at + i] * inverse);
        for (int i = 0; i < STEP_VALUES; i++)
            sum += part[i];
    }
    return sum;
}

/* Smaller scales clip `top`, the largest value of the group, more. So the search ends when the
 * error of `top` alone exceeds the least sum so far. */
static inline __attribute__((always_inline)) float best_scale(const float *w, size_t group)
{
    const float most = largest(w, group), first = scale_of(most, 7.5f, true);
    float top = most, least = INFINITY, best = first;
    for (size_t i = 0; i < group; i++)
        top = w[i] == -most ? -most : top;
    for (int step = 0; step < STEPS; step++) {
        const float s = scale_of(most * (1 - 0.01f * (float)step), 7.5f, true), inverse = 1 / s,
                    unit = powf(s / first, 2.4f);
        if (fabsf(top * inverse) > 9 && unit * error_of(top * inverse) >= least)
            break;
        const float error = unit * sum_of_errors(w, group, inverse, least / unit);
        if (error < least) {
            least = error;
            best = s;
        }
    }
    return best;
}

static void best_scales(float *scale, const float *w, size_t groups, size_t group)
{
    for (size_t g = 0; g < groups; g++)
        scale[g] = best_scale(w + g * group, group);
}

/* As best_scale, with the same bits, eight elements at a time: products are not fused with sums
 * (-ffp-contract=off). */
#if defined __x86_64__
__attribute__((target("avx2"))) static void best_scales_avx2(float *scale, const float *w,
                                                             size_t groups, size_t group)
{
    for (size_t g = 0; g < groups; g++)
        scale[g] = best_scale(w + g * group, group);
}
#endif

void codes_int4_scales(float *scale, const float *w, size_t rows, size_t cols, size_t group)
{
    CHECK(cols % group == 0 && group % STEP_VALUES == 0, "rows of %zu elements in groups of %zu",
          cols, group);
#if defined __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        best_scales_avx2(scale, w, rows * cols / group, group);
        return;
    }
#endif
    best_scales(scale, w, rows * cols / group, group);
}
