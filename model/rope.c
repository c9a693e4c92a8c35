/* Rotary frequencies and what they become for contexts longer than the model was trained with. */
#include "model/rope.h"

#include <math.h>

/* [Su et al. 2021, RoFormer, eq. 15]; scaled as Llama 3.1 does: wavelengths beyond the original context are stretched
 * by `factor`, short ones stay, those between are interpolated. */
static double frequency(const ModelConfig *c, int i)
{
    double f = pow(c->rope_theta, -2.0 * i / c->head_dim);
    if (c->rope_scaling.factor <= 0)
        return f;
    double lo = c->rope_scaling.low_freq_factor, hi = c->rope_scaling.high_freq_factor;
    double wavelength = 2 * M_PI / f, old = c->rope_scaling.original_length;
    if (wavelength > old / lo)
        return f / c->rope_scaling.factor;
    if (wavelength < old / hi)
        return f;
    double s = (old / wavelength - lo) / (hi - lo);
    return (1 - s) * f / c->rope_scaling.factor + s * f;
}

void rope_table(float *table, const ModelConfig *c, int T)
{
    const int half = c->head_dim / 2;
    for (int i = 0; i < half; i++) {
        const double f = frequency(c, i);
        for (int t = 0; t < T; t++) {
            table[((size_t)t * half + i) * 2] = (float)cos(t * f);
            table[((size_t)t * half + i) * 2 + 1] = (float)sin(t * f);
        }
    }
}
