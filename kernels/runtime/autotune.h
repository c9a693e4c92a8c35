/* Measured choices of this machine, stored for later runs: lines of a file in the user's cache
 * folder, $XDG_CACHE_HOME/coat or ~/.cache/coat. Any number of processes may read and add at once.
 * If the file is missing, unreadable, read-only or damaged, choices are only measured again: a line
 * counts only if its checksum is right. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

char *autotune_read(const char *file); /* its text, malloc'ed; "" if there is none */
/* The value of the first line with this key and a value of `bytes`; false: there is none. */
bool autotune_find(const char *text, const char *key, void *value, size_t bytes);
/* Adds a line at the end. key: printable, without line breaks. */
void autotune_add(const char *file, const char *key, const void *value, size_t bytes);
