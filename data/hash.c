/* Three pages are enough: a file that was tokenized differently, shuffled or replaced differs
 * nearly everywhere. Reading whole files could take hours, because a corpus has thousands of files,
 * perhaps on a file server. */
#include "data/hash.h"

#include <sys/mman.h>

enum { PAGE = 4096 };

uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001b3ull;
    return hash;
}

/* The three ranges of 4096 bytes start at multiples of a page. */
uint64_t hash_pages(uint64_t hash, const void *map, size_t bytes)
{
    const size_t offset[] = { 0, bytes / 2 / PAGE * PAGE, (bytes - 1) / PAGE * PAGE };
    madvise((void *)map, bytes, MADV_RANDOM);
    for (int i = 0; i < 3; i++) {
        const size_t left = bytes - offset[i];
        hash = hash_bytes(hash, (const char *)map + offset[i], left < PAGE ? left : PAGE);
    }
    madvise((void *)map, bytes, MADV_NORMAL);
    return hash;
}
