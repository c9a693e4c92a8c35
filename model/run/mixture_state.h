/* data.mix of a run that continues another: every source continues at its position. */
#pragma once
#include "data/loader.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shape/config.h"

/* Fills state->mix from the opened data. */
void mixture_describe(TrainState *state, const Config *c, const Loader *l);

/* The name of a source that had other files in `then`; NULL: there is none. */
const char *mixture_other_files(const TrainState *then, const TrainState *now);

/* now->loader continues the sources of `then`, by name; a source with other files, or a new source,
 * begins at its start. If all names and ratios are the same, the mixture continues; otherwise a new
 * mixture begins at these positions. Sources that only `then` has are stored after the sources of
 * `now`. If a source has the files of data.paths in `then`, it continues their position. */
void mixture_continue(TrainState *now, const TrainState *then);

/* Dies if a source has too few instances for this many more steps. */
void mixture_check(const Loader *l, long steps);

/* Number of steps from the loader's position to the end of `epochs`, which is at most 1. An epoch
 * of a mixture begins when the mixture last changed, and ends when a source has no repetition left.
 * `key`: the configuration's name of epochs. */
long mixture_steps(const Config *c, const Loader *l, const char *key, double epochs);

/* Prints, for each source, what the run takes from the source up to its last step. Call on rank
 * 0. */
void mixture_print(const Config *c, const TrainState *now, const Loader *l, long last_step);
