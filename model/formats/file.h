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

/* The content of the JSON file folder/name, owned by the caller; NULL: there is no such file.
 * flags: of jansson. Dies if the file cannot be parsed; the message names the line. */
json_t *file_json(const char *folder, const char *name, size_t flags);
/* As file_json, but returns NULL if the file cannot be parsed. */
json_t *file_try_json(const char *folder, const char *name);

/* The N of the name step<N><suffix>; -1: it is another name. `numbered`: more digits may follow the
 * suffix. */
long file_step(const char *name, const char *suffix, bool numbered);
/* Sets *steps to the N of all entries step<N><suffix> of a folder, ascending. Returns their
 * number. */
int file_steps(long **steps, const char *folder, const char *suffix);
