/* Three pages are enough: a file that was tokenized differently, shuffled or replaced differs nearly everywhere. Reading whole
 * files could take hours: a corpus has thousands, perhaps on a file server. */
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

/* Samples start at multiples of a page. */
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
