/* Saves a run while it continues. */
#pragma once
#include "model/checkpoint/checkpoint.h"

/* The following four functions save a run while training continues. All ranks must call them. They
 * die if the disk fails; the last complete checkpoint is then unchanged. */

/* Waits for an earlier save, creates files of up to `file_limit` bytes, and copies this rank's
 * slices of weights and moments to host memory. Then returns, while a thread writes these to
 * save_folder/step<N>.tmp. `c` must stay until the save is complete; `s` is copied. Dies if a
 * weight or moment is not finite; the message names it. */
void checkpoint_begin(const Config *c, const ParamStore *store, const TrainState *s,
                      size_t file_limit);
/* If a save is in progress and all ranks have written their slices, completes the save and returns
 * true. Otherwise returns false at once. To complete a save, step<N>.tmp becomes step<N>,
 * save_folder/latest points to it, and older checkpoints are pruned. */
bool checkpoint_poll(void);
void checkpoint_finish(void); /* waits until a save in progress is complete */
void checkpoint_drop(void);   /* discards a save in progress and its files */

/* For a run that cannot continue: saves its state, finite or not, as step<N>-aborted next to its
 * checkpoints, which do not change. Returns the path, malloc'ed, when everything is on disk. */
char *checkpoint_set_aside(const Config *c, const ParamStore *store, const TrainState *s,
                           size_t file_limit);

/* Saves only the weights, as step<N>-average: a folder for other programs, with average.json, which
 * describes the average. Replaces a folder step<N>-average that an earlier process wrote. Dies if
 * the disk fails. No save may be in progress. */
void checkpoint_write_average(const Config *c, const ParamStore *store, const TrainState *s,
                              size_t file_limit);
