/* The save_folder of a run that begins or goes on: whether it may, and what of it stays. */
#pragma once
#include "model/config.h"

/* Makes the folder and those that it lies in. */
void save_folder_make(const char *path);

/* Makes it, for all ranks alike, and returns whether the run goes on with the one that it holds: with what try_load_latest_save found
 * wherever that is; any other checkpoint is one of that run if it is an entry of the folder or its config.yaml names the folder. Dies
 * if another run is there that nobody said to overwrite or go on with, or what a run here would write over or delete. All ranks call. */
bool save_folder_prepare(const Config *c);

/* Of a run that goes on from a checkpoint, which is at that step: whether it need not be saved again, as what was set aside must. All
 * ranks call. */
bool save_folder_has(const Config *c, long step);

/* When everything that can be wrong is known to be right: a run that did not begin leaves nothing to trip over. Tries whether it
 * can save, deletes what this run takes the place of, and writes config.yaml. resumes: what save_folder_prepare said; saved:
 * what save_folder_has said. Rank 0 acts. */
void save_folder_begin(const Config *c, bool resumes, long step, bool saved);
