/* FP8 errors of activations and of the optimizer: every quant_stats_interval steps a line in
 * metrics.jsonl.
 *
 *   quant/<kind>/<block>/<statistic>                   activations that the recipe stores in FP8; kinds: telemetry.c
 *   quant/act/<block>/kurtosis, largest_channel        of SwiGLU's output in any format (outliers.h); a warning if largest_channel is
 *                                                      dangerous
 *   quant/m|v|update/<unit>/<statistic>                moments and m/(sqrt(v)+eps), in the run's formats; unit:
 *                                                      embedding, number of the block, or head
 *   quant/<state>/<unit>/<statistic>                   states of other optimizers, before their update; no error
 *
 * The statistics describe a sample: the first 64 tokens, or the first 64 groups of each matrix:
 *   dynamic_range   max |x| / min |x| != 0 of the elements that share a scale, geometric mean over groups
 *   underflow       share of the values other than 0 that are stored as 0
 *   saturation      share of the values other than 0 that have the largest code (such as the maximum of a tensor with one scale,
 *                   or of each group of a moment)
 *   error           ||q - x|| / ||x||, x: before rounding, q: after; root mean square over matrices. A v that is stored as
 *                   0 gives an update m/eps, so a single such v can make the error large
 *   k, dynamic_range_expanded      with expansion: the mean power, and the dynamic range after it
 *
 * With tensor ranks, the column parts of a tensor count as separate tensors, because each has its
 * own scale. The sample of weights and states is the first rank's.
 *
 * The host computes everything from copies of device memory, and the run does not change. Rank 0
 * measures; with pipeline stages, the first rank of each stage does. With tensor ranks, all ranks
 * of its tensor group measure their parts. Rank 0 writes the line. */
#pragma once
#include "model/model.h"
#include "model/run/log.h"

typedef struct Telemetry Telemetry;

/* Returns NULL if quant_stats_interval is 0 or this rank measures nothing; the other functions then
 * do nothing. All ranks must call them. log: on rank 0; NULL on all other ranks. */
Telemetry *telemetry_open(const Config *c, Model *m, const ParamStore *store, Log *log);
void telemetry_close(Telemetry *t);

/* Call before a step. If the interval divides the step's number, measures the activations of its
 * first micro-batch. */
void telemetry_watch(Telemetry *t, long step);

/* Call before the optimizer, which multiplies gradients by grad_scale. If telemetry_watch started a
 * line, measures the moments after the update, and writes the line. */
void telemetry_write(Telemetry *t, double grad_scale);
