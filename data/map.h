/* Maps files into memory. */
#pragma once
#include <stddef.h>

/* Returns the file's bytes, valid until unmap_file. Dies if the path names no regular file or an
 * empty file, and later if a byte cannot be read (truncation, disk failure). key: the
 * configuration's key for messages. Only one thread may map and unmap. */
const void *map_file(size_t *bytes, const char *key, const char *path);
void unmap_file(const void *bytes);

/* map_newest returns the file that was mapped last; NULL: none is mapped. unmap_files_since unmaps
 * all files that were mapped after `newest`; newest NULL: all files. */
const void *map_newest(void);
void unmap_files_since(const void *newest);

/* Calls read(what) in this thread. If a byte cannot be read any more, returns the message,
 * malloc'ed; else NULL. */
char *map_read(void (*read)(void *), void *what);
