/* What FP8 does to activations and to the optimizer: every quant_stats_interval steps a line in metrics.jsonl.
 *
 *   quant/<kind>/<block>/<statistic>                   activations that the recipe stores in FP8; kinds as in Acts
 *   quant/m|v|update/<unit>/<statistic>                moments and m/(sqrt(v)+eps), in the run's formats; unit:
 *                                                      embedding, number of the block, or head
 *   quant/<state>/<unit>/<statistic>                   what an optimizer other than Adam keeps, in front of its step; no error
 *   quant/optimizer/m|v/<format>/error, underflow      over the model, if Adam's moments were stored so [COAT, tab. 1]:
 *   quant/optimizer/update/<m's>/<v's format>/error    e4m3, e4m3+, e5m2 or e5m2+ in groups of 128, +: with expansion
 *   quant/optimizer/m|v/k                              numbers of groups with k = i/16, i = 0, 1, ...
 *   quant/optimizer/m|v/log2_range                     numbers of groups with i <= log2(dynamic_range) < i + 1
 *   quant/optimizer/m|v/log2_range_expanded            the same behind the expansion
 *
 * with the statistics, all of a sample (the first 64 tokens, or the first 64 groups of each matrix):
 *   dynamic_range   max |x| / min |x| != 0 of the elements that share a scale, geometric mean over groups
 *   underflow       share of the values other than 0 that are stored as 0
 *   saturation      share of the values other than 0 that have the largest code (as the maximum has of a tensor with one scale,
 *                   and of each group of a moment)
 *   error           ||q - x|| / ||x||, x: before rounding, q: as read back; of several matrices the root mean square.
 *                   A v that is stored as 0 leaves m/eps, so one of them can make it large; typical_error, the
 *                   geometric mean over matrices, shows it less
 *   k, dynamic_range_expanded      with expansion: the mean power, and the dynamic range behind it
 *
 * Everything is computed by the host, from what the device has, and changes nothing in the run. Rank 0 only. */
#pragma once
#include "model/model.h"
#include "model/run/log.h"

typedef struct Telemetry Telemetry;

/* NULL if quant_stats_interval is 0 or there is no log: then the other calls do nothing. */
Telemetry *telemetry_open (const Config *c, Model *m, const Fsdp *f, Log *log);
void       telemetry_close(Telemetry *t);

/* In front of a step: if the interval divides its number, the activations of its first micro-batch are measured. */
void telemetry_watch(Telemetry *t, long step);

/* In front of the optimizer, whose update this is and which multiplies gradients by grad_scale: measures the moments
 * as they will be, and writes the line, if telemetry_watch has begun one. */
void telemetry_write(Telemetry *t, long update, double grad_scale);
