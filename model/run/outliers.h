/* Outliers in the output of SwiGLU, which is the input of `down`. In long runs, gate and up of a
 * channel may align and grow. Then, with one scale for the whole FP8 tensor, the other channels
 * lose their digits [Fishman et al. 2024, arXiv 2409.12517, sec. 4]. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernels/runtime/mesh.h"
#include "model/shape/recipe.h"

/* kurtosis: mean(x^4) / mean(x^2)^2 of all elements, which is 3 for a normal distribution.
 * largest_channel: the largest magnitude that the tensor's scale covers, divided by the root mean
 * square of the median channel. */
typedef struct {
    double kurtosis, largest_channel;
} OutlierStats;

/* act (rows, F): a sample; most: the largest magnitude that the scale covers, or that occurs. The
 * ranks of the group `channels` have different channels, the same number each. All ranks must call
 * this; they get the result for all channels. */
OutlierStats outliers_measure(const double *act, size_t rows, size_t F, double most,
                              Ranks channels);

/* The largest_channel from which one scale in E4M3 may cost ordinary channels 1 %: values below the
 * smallest normal code, 2^-6, are off by 2^-9 / sqrt(12), root mean square, which is 1 % of 448 /
 * 7,945. tests/test_outliers.c loses 1 % at about 10,000. With scales of the step later
 * micro-batches are encoded with headroom, so the limit is half. */
double outliers_limit(const Recipe *r);

/* Warns at the first measurement beyond the limit. *warned: state of this block, false at first; it
 * becomes false again when the value falls to half the limit. */
void outliers_watch(bool *warned, long step, int block, double largest_channel, const Recipe *r,
                    bool has_adapters);

/* Calls outliers_watch for all blocks whose quant/act/BLOCK/largest_channel is in the line. warned:
 * (blocks). */
void outliers_watch_line(bool *warned, long step, int blocks, const json_t *line, const Recipe *r,
                         bool has_adapters);
