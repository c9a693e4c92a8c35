/* data.mix of a run that continues another: every source continues at its position. */
#pragma once
#include "data/loader.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shape/config.h"

/* Fills state->mix from the opened data. */
void mixture_describe(TrainState *state, const Config *c, const Loader *l);

/* The name of a source that had other files in `then`; NULL: there is none. */
const char *mixture_other_files(const TrainState *then, const TrainState *now);

/* now->loader continues the sources of `then`, by name; a source with other files, or a new one,
 * begins at its start. If all names and ratios are the same, so is the mixture, which continues;
 * else it begins again from these positions. Sources that only `then` has are stored after those of
 * `now`. A source with the files of data.paths continues those. */
void mixture_continue(TrainState *now, const TrainState *then);

/* Dies if a source has too few instances for this many more steps. */
void mixture_check(const Loader *l, long steps);

/* Steps from the loader's position to the end of `epochs`, at most one. An epoch is all instances
 * of the mixture, since it last changed, until its first source has no repetition left. `key`: the
 * configuration's name of epochs. */
long mixture_steps(const Config *c, const Loader *l, const char *key, double epochs);

/* Prints of each source what the steps up to the last one take. Call on rank 0. */
void mixture_print(const Config *c, const TrainState *now, const Loader *l, long last_step);
