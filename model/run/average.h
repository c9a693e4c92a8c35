/* The average of the weights in a run, `average: {last: N, every: K}`: the mean of N snapshots, one
 * every K steps [Izmailov et al. 2018, arXiv 1803.05407; Kaddour 2022, arXiv 2209.14981]. Snapshots
 * form groups of N: the mean of steps K, 2K, ... NK is complete at step NK, the next one at 2NK. It
 * is the last state of the optimizer's shards, so it is sharded, saved and loaded as the moments
 * are. */
#pragma once
#include "model/checkpoint/checkpoint.h"

/* After this step: adds a snapshot if one is due. */
void average_step(ParamStore *store, const Config *c, long step);

/* Whether a mean is complete at this step. A run that began without the average, or with another
 * one, has no mean for the group of snapshots in which it began. */
bool average_is_complete(const ParamStore *store, const Config *c, const TrainState *s);

/* Whether step<N>-average of that step is there. All ranks call. */
bool average_is_written(const Config *c, const TrainState *s);

/* The average becomes the weights, rounded to their format, until _leave restores them, bit for
 * bit; the host has them meanwhile. */
typedef struct {
    char *weights;
} AverageBackup;
AverageBackup average_enter(ParamStore *store);
void average_leave(ParamStore *store, AverageBackup k);
