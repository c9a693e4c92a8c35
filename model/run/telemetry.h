/* FP8 errors of activations and of the optimizer: every quant_stats_interval steps a line in
 * metrics.jsonl.
 *
 *   quant/<kind>/<block>/<statistic>                   activations that the recipe stores in FP8; kinds: telemetry.c
 *   quant/act/<block>/kurtosis, largest_channel        of SwiGLU's output in any format (outliers.h); a warning where the latter is
 *                                                      dangerous
 *   quant/m|v|update/<unit>/<statistic>                moments and m/(sqrt(v)+eps), in the run's formats; unit:
 *                                                      embedding, number of the block, or head
 *   quant/<state>/<unit>/<statistic>                   states of other optimizers, before their update; no error
 *
 * with the statistics, all of a sample (the first 64 tokens, or the first 64 groups of each
 * matrix):
 *   dynamic_range   max |x| / min |x| != 0 of the elements that share a scale, geometric mean over groups
 *   underflow       share of the values other than 0 that are stored as 0
 *   saturation      share of the values other than 0 that have the largest code (such as the maximum of a tensor with one scale,
 *                   or of each group of a moment)
 *   error           ||q - x|| / ||x||, x: before rounding, q: after; root mean square over matrices. A v that is stored as
 *                   0 gives an update m/eps, so a single one can make it large
 *   k, dynamic_range_expanded      with expansion: the mean power, and the dynamic range after it
 *
 * With tensor ranks the parts of columns of a tensor count as tensors, since each has a scale of
 * its own; of weights and their states the sample is the first rank's.
 *
 * The host computes everything from copies of device memory, and the run does not change. Rank 0
 * measures; with pipeline stages the first rank of each; with tensor ranks those that compute with
 * it measure their parts. Rank 0 writes. */
#pragma once
#include "model/model.h"
#include "model/run/log.h"

typedef struct Telemetry Telemetry;

/* NULL if quant_stats_interval is 0 or this rank has nothing to do: then the other calls do
 * nothing. All ranks call them. log: rank 0's, else NULL. */
Telemetry *telemetry_open(const Config *c, Model *m, const ParamStore *store, Log *log);
void telemetry_close(Telemetry *t);

/* Before a step: if the interval divides its number, measures the activations of its first
 * micro-batch. */
void telemetry_watch(Telemetry *t, long step);

/* Before the optimizer, which multiplies gradients by grad_scale: if telemetry_watch started a
 * line, measures the moments after the update, and writes the line. */
void telemetry_write(Telemetry *t, double grad_scale);
