/* The order of the data. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* numpy.random.Generator(PCG64(seed)).shuffle of 0 .. n-1, bit for bit. go_on is called with `who` every few milliseconds;
 * when it says false the shuffle ends unfinished and returns false. NULL: nothing is called. */
bool numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *who), void *who);
