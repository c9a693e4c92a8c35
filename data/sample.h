/* Hashes of names, numbers and files. */
#pragma once
#include <stddef.h>
#include <stdint.h>

static const uint64_t HASH_OF_NOTHING = 0xcbf29ce484222325;

/* FNV-1a of what `hash` is of, and of these bytes. */
uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes);

/* The same of a file in memory by 4096 bytes each from its start, its middle and its end. They are read from the disk one by one,
 * nothing ahead: of a file whose start is in memory, two pages. */
uint64_t hash_sample(uint64_t hash, const void *map, size_t bytes);
