/* Rotary frequencies, and their changes for context extension. */
#include "model/shape/rope_table.h"

#include <math.h>

/* Frequencies with wavelengths above original length / low_freq_factor are divided by `factor`,
 * frequencies with wavelengths below original length / high_freq_factor stay, frequencies between
 * these are interpolated [Llama 3.1]. f: the original frequency. */
static double llama3(const ModelConfig *c, double f)
{
    double lo = c->rope_scaling.low_freq_factor, hi = c->rope_scaling.high_freq_factor;
    double wavelength = 2 * M_PI / f, old = c->rope_scaling.original_length;
    if (wavelength > old / lo)
        return f / c->rope_scaling.factor;
    if (wavelength < old / hi)
        return f;
    double s = (old / wavelength - lo) / (hi - lo);
    return (1 - s) * f / c->rope_scaling.factor + s * f;
}

/* The (real-valued) number of the pair that makes this many rotations over the original context. */
static double pair_of(const ModelConfig *c, double rotations)
{
    return c->head_dim * log(c->rope_scaling.original_length / (rotations * 2 * M_PI)) /
           (2 * log(c->rope_theta));
}

/* Pairs with more than beta_fast rotations over the original context stay. Pairs with less than
 * beta_slow rotations are divided by `factor`. Between them, the weight of the division changes
 * linearly with the pair's number [Peng et al. 2023, YaRN, sec. 3.2; as in transformers, the ends
 * of this ramp are rounded outwards and clamped to 0 .. D-1]. */
static double yarn(const ModelConfig *c, double f, int i)
{
    double low = fmax(floor(pair_of(c, c->rope_scaling.beta_fast)), 0);
    double high = fmin(ceil(pair_of(c, c->rope_scaling.beta_slow)), c->head_dim - 1);
    if (low == high)
        high += 0.001;
    double stretched = fmin(fmax((i - low) / (high - low), 0), 1);
    return stretched * f / c->rope_scaling.factor + (1 - stretched) * f;
}

/* [Su et al. 2021, RoFormer, eq. 15]. Frequency 0 means no rotation: q and k keep their values. */
static double frequency(const ModelConfig *c, Rotation rotation, int i)
{
    double f = rotation == NO_ROTATION ? 0 : pow(c->rope_theta, -2.0 * i / c->head_dim);
    switch (rotation == ROTATION_SCALED ? c->rope_scaling.type : ROPE_DEFAULT) {
    case ROPE_LLAMA3: return llama3(c, f);
    case ROPE_YARN: return yarn(c, f, i);
    default: return f;
    }
}

double rope_attention_factor(const ModelConfig *c)
{
    if (c->rope_scaling.type != ROPE_YARN)
        return 1;
    double given = c->rope_scaling.attention_factor;
    return given > 0 ? given : 0.1 * log(c->rope_scaling.factor) + 1;
}

void rope_table(float *table, const ModelConfig *c, Rotation rotation, int T)
{
    const int half = c->head_dim / 2;
    const double size = rotation == ROTATION_SCALED ? rope_attention_factor(c) : 1;
    for (int i = 0; i < half; i++) {
        const double f = frequency(c, rotation, i);
        for (int t = 0; t < T; t++) {
            table[((size_t)t * half + i) * 2] = (float)(size * cos(t * f));
            table[((size_t)t * half + i) * 2 + 1] = (float)(size * sin(t * f));
        }
    }
}
