/* Choices that were measured on this machine and that later runs make again: lines of a file in the user's cache folder,
 * $XDG_CACHE_HOME/coat or ~/.cache/coat. Any number of processes may read and add at once. A file that is missing, cannot be read
 * or written, or is damaged costs the time of choosing again, and nothing else: a line counts only if its checksum is right. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

char *choices_read(const char *file);          /* its text, for free(); "" if there is none */
/* The value of the first line with this key; false if there is none of so many bytes. */
bool  choices_find(const char *text, const char *key, void *value, size_t bytes);
/* Adds a line at the end. key: printable, without line breaks. */
void  choices_add (const char *file, const char *key, const void *value, size_t bytes);
