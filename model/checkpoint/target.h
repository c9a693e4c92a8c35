/* A folder that somebody names, which appears when it is complete. */
#pragma once
#include <stdbool.h>

/* begin: makes a <path>.tmp with an empty file `unfinished`, in place
 * of what was left by who was interrupted; dies if there is a `path`, a <path>.tmp that is none of these, or if another process
 * fills it. complete: it becomes `path`, durable. `begun`: what begin returned. is_unfinished: whether `path` is such a
 * <path>.tmp. */
int   target_begin(const char *path);
void  target_complete(const char *path, int begun);
bool  target_is_unfinished(const char *path);
