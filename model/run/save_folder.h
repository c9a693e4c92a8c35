/* The save_folder at the start of a run: whether the run may use it, and what is kept. */
#pragma once
#include "model/shape/config.h"

/* Creates the folder and its parents. */
void save_folder_make(const char *path);

/* Creates it, and returns, on all ranks, whether the run continues the run in it: if
 * try_load_latest_save found a checkpoint, or if the loaded checkpoint is an entry of the folder or
 * its config.yaml names the folder. Dies if there is another run that was not to be overwritten or
 * continued, or something that a run might overwrite or delete. All ranks call. */
bool save_folder_prepare(const Config *c);

/* Whether the loaded checkpoint is step<N> of the folder, so that it need not be saved again. A
 * loaded step<N>-aborted must be saved. All ranks call. */
bool save_folder_has(const Config *c, long step);

/* Called after all checks, so that a run that does not start leaves no files. Tries the operations
 * of a save, deletes the run that this one replaces, and writes config.yaml. resumes: result of
 * save_folder_prepare; saved: of save_folder_has. Rank 0 acts. */
void save_folder_begin(const Config *c, bool resumes, long step, bool saved);
