/* Choices that were measured on this machine, stored for later runs. The choices are lines of a
 * file in the user's cache folder, $XDG_CACHE_HOME/coat or ~/.cache/coat. Any number of processes
 * may read and add lines at once. A line counts only if its checksum is right. If the file is
 * missing, unreadable, read-only or damaged, choices are measured again. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

char *autotune_read(const char *file); /* text of the file, malloc'ed; "" if there is none */
/* Gets the value of the first line with this key and a value of `bytes` bytes. Returns false if
 * there is no such line. */
bool autotune_find(const char *text, const char *key, void *value, size_t bytes);
/* Adds a line at the end of the file. The key must be printable and without line breaks. */
void autotune_add(const char *file, const char *key, const void *value, size_t bytes);
