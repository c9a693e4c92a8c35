/* An output folder that appears only when it is complete. */
#pragma once
#include <stdbool.h>

/* Creates <path>.tmp with an empty file `unfinished`. Replaces the remains of an interrupted
 * process. Dies if `path` exists, if <path>.tmp is another folder, or if another process writes
 * it. */
int target_begin(const char *path);
/* Renames <path>.tmp to `path`, durably. begun: the result of target_begin. */
void target_complete(const char *path, int begun);
/* Whether `path` is a <path>.tmp of target_begin. */
bool target_is_unfinished(const char *path);
