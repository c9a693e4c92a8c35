/* Finds files by patterns with **, *, ? and [...]. */
#pragma once
#include <stdbool.h>

typedef struct {
    char **path;
    int count;
} Matches;

bool pattern_is(const char *path); /* whether the path contains *, ? or [ */

/* All matches, sorted by bytes, without duplicates, by the rules of Python's glob with
 * recursive=True. A path component ** matches any number of folders, also none; at the end of the
 * pattern it matches all files below. A name that begins with a dot only matches a pattern with
 * this dot. Symbolic links to folders are followed, except to a parent of the link. *error: 0, or
 * the errno of a folder that cannot be listed. */
Matches pattern_match(const char *pattern, int *error);
void pattern_free(Matches *m);
