/* Functions for files of a folder and for JSON files. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

/* whether the path exists, even as a broken link */
bool file_exists(const char *path);
/* whether folder/name exists, even as a broken link */
bool file_is_in(const char *folder, const char *name);
/* whether both paths exist and are the same file or folder */
bool file_is_same(const char *path, const char *other);

/* The content of the JSON file folder/name, owned by the caller; NULL: there is no such file. If it
 * cannot be parsed, the first function dies and names the line; the second returns NULL. flags: of
 * jansson. */
json_t *file_json(const char *folder, const char *name, size_t flags);
json_t *file_try_json(const char *folder, const char *name);

/* file_step: the N of the name step<N><suffix>; `numbered`: more digits may follow the suffix; -1:
 * it is another name. file_steps: the N of all such entries of a folder, ascending; returns their
 * number. */
long file_step(const char *name, const char *suffix, bool numbered);
int file_steps(long **steps, const char *folder, const char *suffix);
