/* Checks that all hosts share the save_folder. */
#pragma once

/* Dies if a rank's `folder` is not the same folder as rank 0's; the message names rank and host.
 * Every rank writes its slices of a checkpoint into the folder, and rank 0 renames it when it is
 * complete. The folder must exist. All ranks must call this. */
void shared_folder_check(const char *folder);
