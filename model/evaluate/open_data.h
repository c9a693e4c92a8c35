/* Opens the token files of a run. */
#pragma once
#include "data/loader.h"
#include "model/shape/buffers.h"

/* Opens training data (set NULL) or a validation set. The watchdog waits meanwhile. problem: as in
 * loader_try_open, for data that was opened before and needs no warnings; problem NULL: dies on an
 * error. All ranks must call this. */
Loader *open_data(char **problem, const Config *c, const EvalSet *set);

/* The folder with the vision tower, which is load_path or the base of its adapters; NULL: there is
 * none. */
const char *tower_folder(const Config *c);
/* The hash of the tower (tower.h); 0: unknown. It is computed once, because a run may delete the
 * folder from which it started. */
uint64_t tower_of(const Config *c);

/* The images of a batch from sequence `first` on, as model_use_images expects them; sequences have
 * T tokens. */
ImageRows batch_images(const Batch *b, int first, int T);
