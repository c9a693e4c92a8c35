/* Opens the token files of a run. */
#pragma once
#include "data/loader.h"
#include "model/shape/buffers.h"

/* Opens training data (set NULL) or a validation set. The watchdog waits for it. problem: as in
 * loader_try_open, for data that was opened before and needs no warnings; NULL: dies instead. All
 * ranks call. */
Loader *open_data(char **problem, const Config *c, const EvalSet *set);

/* The folder with the vision tower: that of load_path, or the base of its adapters; NULL: there is
 * none. And the hash of the tower (tower.h), 0: unknown; it is computed once, since a run may
 * delete the folder from which it started. */
const char *tower_folder(const Config *c);
uint64_t tower_of(const Config *c);

/* The images of a batch from sequence `first` on, for model_use_images; sequences have T tokens. */
ImageRows batch_images(const Batch *b, int first, int T);
