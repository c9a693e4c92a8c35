/* Factors of the columns of an FP8 operand, which are powers of two. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { FIELDS = 256 };

static int exponent_field(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int)(bits >> 23 & 0xff);
}

/* Returns the exponent k of a column's factor 2^k. field: exponent field of the column's maximum.
 * median: median of the exponent fields of all columns. */
static int excess(int field, int median)
{
    const int k = field - median - CHANNEL_EXCESS;
    return k <= 0 ? 0 : k < CHANNEL_MOST ? k : CHANNEL_MOST;
}

/* Returns the median exponent field: the smallest value that at least half of the nonzero columns
 * do not exceed. */
static int median_field(const float *amax, int columns)
{
    int count[FIELDS] = { 0 }, all = 0, below = 0, field = 0;
    for (int c = 0; c < columns; c++)
        count[exponent_field(amax[c])]++;
    all = columns - count[0];
    while (field + 1 < FIELDS && 2 * below < all)
        below += count[++field];
    return field;
}

/* Sets act.channel from the values of act. */
static void choose(Tensor act, const float *values, float *amax)
{
    const int F = act.cols;
    memset(amax, 0, (size_t)F * sizeof *amax);
    for (size_t i = 0; i < tensor_numel(act); i++)
        amax[i % (size_t)F] = fmaxf(amax[i % (size_t)F], fabsf(values[i]));
    const int median = median_field(amax, F);
    for (int c = 0; c < F; c++)
        act.channel[c] = ldexpf(1, -excess(exponent_field(amax[c]), median));
}

void channels_multiply(Tensor act, float *values)
{
    for (size_t i = 0; act.channel && i < tensor_numel(act); i++)
        values[i] *= act.channel[i % (size_t)act.cols];
}

void channels_apply(Tensor act, float *values)
{
    if (act.channel && !scale_is_reused(act))
        choose(act, values, cpu_scratch(2, (size_t)act.cols));
    channels_multiply(act, values);
}

void backend_fold_channels(Tensor y, Tensor w, const float *channel)
{
    check_fold_channels(y, w);
    const uint8_t *from = w.data;
    uint8_t *to = y.data;
    float least = 1;
    for (int c = 0; c < w.cols; c++)
        least = fminf(least, channel[c]);
    *(float *)y.scale = *(const float *)w.scale / least;
    for (size_t i = 0; i < tensor_numel(w); i++)
        to[i] =
            fp8_encode(fp8_decode(from[i], w.format.dtype) * (least / channel[i % (size_t)w.cols]),
                       w.format.dtype);
}
