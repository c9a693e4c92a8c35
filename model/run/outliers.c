/* largest_channel of blocks, and when it is dangerous. */
#include "model/run/outliers.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/fp8.h"
#include "kernels/runtime/error.h"

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

OutlierStats outliers_measure(const double *act, size_t rows, size_t F, double most)
{
    double *channel = xcalloc(F, sizeof *channel), square = 0, fourth = 0;
    for (size_t i = 0; i < rows * F; i++) {
        const double x2 = act[i] * act[i];
        channel[i % F] += x2;
        square += x2;
        fourth += x2 * x2;
    }
    qsort(channel, F, sizeof *channel, ascending);
    const double n = (double)(rows * F), median = sqrt(channel[F / 2] / (double)rows);
    free(channel);
    return (OutlierStats){ n * fourth / (square * square), most / median };
}

double outliers_limit(const Recipe *r)
{
    const double one_percent = 0x1p-9 / sqrt(12) / 0.01;
    return fp8_max(E4M3) / one_percent / (r->scales == OF_STEP ? fp8_headroom(E4M3) : 1);
}

void outliers_watch(bool *warned, long step, int block, double x, const Recipe *r, bool has_adapters)
{
    const double limit = outliers_limit(r);
    if (r->operand.dtype != E4M3 || !isfinite(x))
        return;
    if (x > limit && !*warned)
        warn("step %ld, block %d: quant/act/%d/largest_channel is %.0f: SwiGLU's output has an outlier. From %.0f on the other "
             "channels of down_proj's FP8 input lose 1 %% of their values to its scale. %s", step, block, block, x, limit,
             r->down_scales == DOWN_CHANNEL || has_adapters
             ? "--format.operand=bf16 --format.gradient=bf16 continues with BF16 GEMMs"
             : "--fp8.down_scales=channel gives the outlier a scale of its own");
    *warned = x > (*warned ? limit / 2 : limit);
}

void outliers_watch_line(bool *warned, long step, int blocks, const json_t *line, const Recipe *r, bool has_adapters)
{
    for (int l = 0; l < blocks; l++) {
        char key[64];
        snprintf(key, sizeof key, "quant/act/%d/largest_channel", l);
        const json_t *x = json_object_get(line, key);
        if (json_is_number(x))
            outliers_watch(&warned[l], step, l, json_number_value(x), r, has_adapters);
    }
}
