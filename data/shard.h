/* One file of tokens, mapped into memory and checked. Inside data/ only; the rest of the program uses loader.h. */
#pragma once
#include "data/spec.h"

#include <string.h>

typedef struct {
    const char    *key;          /* where the configuration names it                                            */
    char          *path;
    const uint8_t *tokens;       /* (num_tokens) little-endian numbers of itemsize bytes, inside map            */
    const uint8_t *mask;         /* (num_tokens) bool: 0 where a token is not a target; NULL: none              */
    uint64_t       num_tokens;
    int            itemsize;     /* 2 or 4                                                                      */
    const void    *map;          /* the whole file                                                              */
    size_t         map_bytes;
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

/* All files of spec in order, patterns expanded; *num gets their number. Dies on the first file that is not what
 * spec says: missing, empty, of a foreign format, of the wrong size or dtype, without its label mask. */
Shard *shards_open (int *num, const DataSpec *spec);
void   shards_close(Shard *shards, int num);

/* spec->beat, if there is one, with "reading part/3.npy". */
void shard_tell(const DataSpec *spec, const char *verb, const char *path);

/* ids[0 .. count-1] = tokens first .. of the shard. Returns the place in ids of the first id >= vocab_size, or -1. */
int shard_read(int *ids, const Shard *s, uint64_t first, int count, int vocab_size);

/* The sentence about an id that shard_read found: file, place, id, vocabulary, remedy. */
void shard_describe_bad_id(char *text, size_t size, const Shard *s, uint64_t place, int vocab_size);

/* Warns if spec->eos_token_id does not seem to be what ends the documents. */
void shards_check_eos(const Shard *shards, int num, const DataSpec *spec);
