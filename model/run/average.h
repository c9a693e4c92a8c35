/* The average of the weights in a run, `average: {last: N, every: K}`: the mean of N snapshots, one
 * every K steps [Izmailov et al. 2018, arXiv 1803.05407; Kaddour 2022, arXiv 2209.14981]. Snapshots
 * form groups of N: the mean of steps K, 2K, ... NK is complete at step NK, the next mean at step
 * 2NK. The average is the last state of the optimizer, so it is sharded, saved and loaded like the
 * moments. */
#pragma once
#include "model/checkpoint/checkpoint.h"

/* Call after each step: adds a snapshot if one is due. */
void average_step(ParamStore *store, const Config *c, long step);

/* Whether a mean is complete at this step. A run that began without the average, or with other
 * settings of the average, has no mean for the group of snapshots in which it began. */
bool average_is_complete(const ParamStore *store, const Config *c, const TrainState *s);

/* Whether step<N>-average of this step exists. All ranks must call this. */
bool average_is_written(const Config *c, const TrainState *s);

/* Between average_enter and average_leave, the average replaces the weights, rounded to their
 * format; the host keeps the weights. average_leave restores them bit for bit. */
typedef struct {
    char *weights;
} AverageBackup;
AverageBackup average_enter(ParamStore *store);
void average_leave(ParamStore *store, AverageBackup k);
