/* The order of training data. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* Shuffles 0 .. n-1 as numpy.random.Generator(PCG64(seed)).shuffle does, bit for bit. Calls
 * go_on(arg) every few milliseconds (NULL: never). If go_on returns false, the shuffle stops
 * unfinished and returns false. */
bool numpy_shuffle(uint32_t *index, uint64_t n, uint64_t seed, bool (*go_on)(void *arg), void *arg);
