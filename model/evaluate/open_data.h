/* Opens the token files of a run. */
#pragma once
#include "data/loader.h"
#include "model/shape/buffers.h"

/* Opens training data (set NULL) or a validation set. The watchdog does not end the run meanwhile,
 * as long as files are read. problem NULL: dies on an error. Otherwise, for data that were opened
 * before, *problem is set as by loader_try_open, and warnings are not repeated. All ranks must call
 * this. */
Loader *open_data(char **problem, const Config *c, const EvalSet *set);

/* The folder with the vision tower: load_path or, if load_path has adapters, the folder of their
 * base model. NULL: there is no tower. */
const char *tower_folder(const Config *c);
/* The hash of the tower (tower.h); 0: unknown. The hash is computed once, because a run may delete
 * the folder from which it started. */
uint64_t tower_of(const Config *c);

/* The images of a batch from sequence `first` on, as model_use_images expects them; sequences have
 * T tokens. */
ImageRows batch_images(const Batch *b, int first, int T);
