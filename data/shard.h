/* One file of tokens, mapped into memory and checked. Inside data/ only; other folders use
 * loader.h. */
#pragma once
#include "data/spec.h"

#include <string.h>

typedef struct {
    const char *key; /* the configuration's key for messages */
    char *path;
    /* (num_tokens) little-endian numbers of itemsize bytes, a part of map */
    const uint8_t *tokens;
    /* (num_tokens) bool: 0: the token is not a target; NULL: no mask */
    const uint8_t *mask;
    const char *values; /* (num_tokens, spec.value_bytes), of spec.value_suffix; NULL: none */
    uint64_t num_tokens;
    int itemsize;    /* bytes of a token: 2 or 4 */
    const void *map; /* the whole file */
    size_t map_bytes;
    const void *image_map; /* the shard's index of images (images.h); NULL: none */
    uint64_t num_images;
    /* number of image tokens before each block of tokens; the last entry: in the whole file */
    uint64_t *images_before;
} Shard;

static inline uint32_t token_at(const Shard *s, uint64_t i)
{
    if (s->itemsize == 2) {
        uint16_t id;
        memcpy(&id, s->tokens + i * 2, 2);
        return id;
    }
    uint32_t id;
    memcpy(&id, s->tokens + i * 4, 4);
    return id;
}

/* Opens all files of spec, in order, with patterns expanded; *num: number of files. Dies on the
 * first file that is missing, empty, of a foreign format, of the wrong size or dtype, or without
 * its label mask. */
Shard *shards_open(int *num, const DataSpec *spec);
/* Opens other files, one for each shard, with patterns expanded: calls open(who, shard, path) for
 * each. Dies if the number of files is not the number of shards. */
void shards_open_others(Shard *shards, int num, const DataSpec *spec, const char *key, char **paths,
                        int num_paths, void (*open)(void *who, Shard *s, const char *path),
                        void *who);
void shards_close(Shard *shards, int num);

/* Calls spec->beat, if it is not NULL, with a text such as "reading part/3.npy". */
void shard_tell(const DataSpec *spec, const char *verb, const char *path);

/* ids[0 .. count-1] = tokens from `first` on. Returns the index of the first id >= vocab_size, or
 * -1. */
int shard_read(int *ids, const Shard *s, uint64_t first, int count, int vocab_size);

/* Writes the error message for an id found by shard_read: file, position, id, vocabulary,
 * remedy. */
void shard_describe_bad_id(char *text, size_t size, const Shard *s, uint64_t offset,
                           int vocab_size);

/* Warns if documents do not seem to end with spec->eos_token_id. */
void shards_check_eos(const Shard *shards, int num, const DataSpec *spec);
