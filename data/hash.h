/* Hashes of names, numbers and files. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* hashes of sampled bytes of each file; 0: unknown */
typedef struct {
    uint64_t tokens, masks;
} DataHashes;

static const uint64_t HASH_OF_NOTHING = 0xcbf29ce484222325;

/* FNV-1a: extends `hash` by these bytes. */
uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes);

/* Extends `hash` by 4096 bytes each from the start, the middle and the end of a mapped file. Reads
 * at most these three pages from disk. */
uint64_t hash_pages(uint64_t hash, const void *map, size_t bytes);
