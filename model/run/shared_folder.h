/* Checks that all hosts share the save_folder. */
#pragma once

/* Every rank writes its part of a checkpoint into `folder`, and rank 0 renames it when it is
 * complete. Dies, naming rank and host, if a rank's folder is not the same as rank 0's. The folder
 * exists. All ranks call. */
void shared_folder_check(const char *folder);
