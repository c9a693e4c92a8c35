/* Computes largest_channel of blocks, and the limit above which it is dangerous. */
#include "model/run/outliers.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/fp8.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

OutlierStats outliers_measure(const double *act, size_t rows, size_t F, double most, Ranks channels)
{
    const size_t ranks = (size_t)comm_group_size(channels), all_F = ranks * F;
    double *channel = xcalloc(F, sizeof *channel), *all = xmalloc(all_F * sizeof *all),
           *largest = xmalloc(ranks * sizeof *largest);
    double sums[2] = { 0 }; /* sum of squares, and sum of fourth powers */
    for (size_t i = 0; i < rows * F; i++) {
        const double x2 = act[i] * act[i];
        channel[i % F] += x2;
        sums[0] += x2;
        sums[1] += x2 * x2;
    }
    comm_gather(all, channel, F * sizeof *all, channels);
    comm_gather(largest, &most, sizeof most, channels);
    comm_sum_over(sums, 2, channels);
    qsort(all, all_F, sizeof *all, ascending);
    for (size_t i = 0; i < ranks; i++)
        most = fmax(most, largest[i]);
    const double n = (double)(rows * all_F), median = sqrt(all[all_F / 2] / (double)rows);
    free(channel), free(all), free(largest);
    return (OutlierStats){ n * sums[1] / (sums[0] * sums[0]), most / median };
}

double outliers_limit(const Recipe *r)
{
    const double one_percent = 0x1p-9 / sqrt(12) / 0.01;
    return fp8_max(E4M3) / one_percent / (r->scales == PER_STEP ? fp8_headroom(E4M3) : 1);
}

void outliers_watch(bool *warned, long step, int block, double x, const Recipe *r,
                    bool has_adapters)
{
    const double limit = outliers_limit(r);
    if (r->operand.dtype != E4M3 || !isfinite(x))
        return;
    if (x > limit && !*warned)
        warn("step %ld, block %d: quant/act/%d/largest_channel is %.0f: SwiGLU's output has an "
             "outlier. Above %.0f, the scale of down_proj's FP8 input is so large that the other "
             "channels lose 1 %% of their values. %s",
             step, block, block, x, limit,
             r->down_scales == DOWN_CHANNEL || has_adapters
                 ? "--format.operand=bf16 --format.gradient=bf16 continues with BF16 GEMMs"
                 : "--fp8.down_scales=channel gives the outlier a scale of its own");
    *warned = x > (*warned ? limit / 2 : limit);
}

void outliers_watch_line(bool *warned, long step, int blocks, const json_t *line, const Recipe *r,
                         bool has_adapters)
{
    for (int l = 0; l < blocks; l++) {
        char key[64];
        snprintf(key, sizeof key, "quant/act/%d/largest_channel", l);
        const json_t *x = json_object_get(line, key);
        if (json_is_number(x))
            outliers_watch(&warned[l], step, l, json_number_value(x), r, has_adapters);
    }
}
