/* One save_folder for all hosts. */
#pragma once

/* Every rank writes its part of a checkpoint into `folder`, which rank 0 renames when it is whole: dies, and names rank and host,
 * if what a rank sees there is not what rank 0 sees. The folder exists. All ranks call. */
void shared_folder_check(const char *folder);
