/* Files in memory without reading them. */
#pragma once
#include <stddef.h>

/* The file's bytes, as long as unmap_file is not called. Dies if there is no such regular file or it is empty, and when a
 * byte is read that can no longer be had: a file cut since, a disk that fails. key: where the configuration names it. Maps
 * are made and given back by one thread; any may read. */
const void *map_file  (size_t *bytes, const char *key, const char *path);
void        unmap_file(const void *bytes);

/* Gives back all that were made since `newest` was the newest; NULL: there was none. */
const void *map_newest(void);
void        unmap_files_since(const void *newest);

/* read(what), in this thread. Where it meets a byte that can no longer be had, what is wrong is returned, malloc'ed; else NULL. */
char *map_read(void (*read)(void *), void *what);
