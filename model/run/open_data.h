/* Opening what a run reads tokens from. */
#pragma once
#include "data/loader.h"
#include "model/config.h"

/* The data to train on, or of a validation set; NULL: the first. The watchdog waits for it. problem: as loader_try_open, of what was
 * opened before and needs no warnings; NULL: dies instead. All ranks call. */
Loader *open_data(char **problem, const Config *c, const EvalSet *set);
