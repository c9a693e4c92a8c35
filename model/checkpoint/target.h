/* An output folder that only appears when it is complete. */
#pragma once
#include <stdbool.h>

/* begin: creates <path>.tmp with an empty file `unfinished`, replacing the remains of an
 * interruption. Dies if `path` exists, if <path>.tmp is something else, or if another process is
 * writing it. complete: renames it to `path`, durable. `begun`: the result of begin. is_unfinished:
 * whether `path` is such a <path>.tmp. */
int target_begin(const char *path);
void target_complete(const char *path, int begun);
bool target_is_unfinished(const char *path);
