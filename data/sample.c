/* A file that was made again with another tokenizer, shuffled or exchanged differs nearly everywhere: three pages show it. Files of
 * a corpus are thousands, maybe on a file server, so that to read them all would take hours. */
#include "data/sample.h"

#include <sys/mman.h>

enum { SAMPLE = 4096 };

uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001b3ull;
    return hash;
}

/* Places are multiples of a page. */
uint64_t hash_sample(uint64_t hash, const void *map, size_t bytes)
{
    const size_t places[] = { 0, bytes / 2 / SAMPLE * SAMPLE, (bytes - 1) / SAMPLE * SAMPLE };
    madvise((void *)map, bytes, MADV_RANDOM);
    for (int i = 0; i < 3; i++) {
        const size_t left = bytes - places[i];
        hash = hash_bytes(hash, (const char *)map + places[i], left < SAMPLE ? left : SAMPLE);
    }
    madvise((void *)map, bytes, MADV_NORMAL);
    return hash;
}
