/* The save_folder at the start of a run: whether the run may use it, and which of its files
 * stay. */
#pragma once
#include "model/shape/config.h"

/* Creates the folder and its parents. */
void save_folder_make(const char *path);

/* Creates the folder. Returns, on all ranks, whether the run continues the run in the folder: if
 * try_load_latest_save found a checkpoint, or if the loaded checkpoint is an entry of the folder or
 * its config.yaml names the folder. Dies if the folder has another run that the user did not ask to
 * overwrite or continue, or files that a run might overwrite or delete. All ranks must call
 * this. */
bool save_folder_prepare(const Config *c);

/* Whether the loaded checkpoint is step<N> of the folder, so that it need not be saved again. A
 * loaded step<N>-aborted must be saved. All ranks must call this. */
bool save_folder_has(const Config *c, long step);

/* Call this after all checks, so that a run that does not start leaves no files. Tries the
 * operations of a save, deletes the run that this one replaces, and writes config.yaml. resumes:
 * result of save_folder_prepare; saved: result of save_folder_has. Only rank 0 calls this. */
void save_folder_begin(const Config *c, bool resumes, long step, bool saved);
