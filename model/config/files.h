/* What lies in a folder. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

bool file_exists (const char *path);                            /* anything of that name, a link that leads nowhere too */
bool file_is_in  (const char *folder, const char *name);        /* the same of folder/name */
bool file_is_same(const char *path, const char *other);         /* both are there, and one file or folder */

/* What the JSON file folder/name holds, which the caller owns; NULL: there is none. Dies, with its line, if it cannot be read; the
 * second returns NULL then, too. flags: jansson's. */
json_t *file_json    (const char *folder, const char *name, size_t flags);
json_t *file_try_json(const char *folder, const char *name);

/* N of the name step<N><suffix>, after which there may be digits if it is `numbered`; -1: it is another one. steps: that of all such
 * entries of a folder, ascending; their number. */
long file_step (const char *name, const char *suffix, bool numbered);
int  file_steps(long **steps, const char *folder, const char *suffix);
