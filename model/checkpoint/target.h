/* An output folder that appears only when it is complete. */
#pragma once
#include <stdbool.h>

/* target_begin: creates <path>.tmp with an empty file `unfinished`; replaces the remains of an
 * interrupted process. Dies if `path` exists, if <path>.tmp is another folder, or if another
 * process writes it. target_complete: renames <path>.tmp to `path`, durably. begun: the result of
 * target_begin. target_is_unfinished: whether `path` is such a <path>.tmp. */
int target_begin(const char *path);
void target_complete(const char *path, int begun);
bool target_is_unfinished(const char *path);
