/* Names with *, ? and [...] -> the files that have such names. */
#pragma once
#include <stdbool.h>

typedef struct { char **path; int count; } Matches;

bool    pattern_is(const char *path);       /* whether it has *, ? or [ */

/* What there is of these names, sorted by bytes, each once, by the rules of Python's glob with recursive=True. ** as a whole part
 * of the path is any number of folders, also none; at the end it is all files in them and below. What begins with a dot matches
 * only where the pattern has that dot. A symbolic link to a folder is a folder, but not one that leads back to where it lies. error: 0,
 * or the errno of a folder that cannot be listed. */
Matches pattern_match(const char *pattern, int *error);
void    pattern_free (Matches *m);
