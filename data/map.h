/* Maps files into memory. */
#pragma once
#include <stddef.h>

/* The file's bytes, valid until unmap_file. Dies if there is no such regular file or it is empty,
 * and later if a byte cannot be read any more (truncation, disk failure). key: the configuration's
 * key for messages. Only one thread may map and unmap. */
const void *map_file(size_t *bytes, const char *key, const char *path);
void unmap_file(const void *bytes);

/* Unmaps all files that were mapped since `newest` was the newest; NULL: there was none. */
const void *map_newest(void);
void unmap_files_since(const void *newest);

/* Calls read(what) in this thread. If a byte cannot be read any more, returns the message,
 * malloc'ed; else NULL. */
char *map_read(void (*read)(void *), void *what);
