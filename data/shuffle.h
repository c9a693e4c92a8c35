/* The order of the data. */
#pragma once
#include <stdint.h>

/* numpy.random.Generator(PCG64(seed)).shuffle of 0 .. n-1, bit for bit. */
void numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed);
