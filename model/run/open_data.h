/* Opens the token files of a run. */
#pragma once
#include "data/loader.h"
#include "model/config.h"

/* Opens training data (set NULL) or a validation set. The watchdog waits for it. problem: as in loader_try_open, for data that was
 * opened before and needs no warnings; NULL: dies instead. All ranks call. */
Loader *open_data(char **problem, const Config *c, const EvalSet *set);
