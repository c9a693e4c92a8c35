/* Joins arrays of which each rank has some elements. */
#pragma once
#include <stdint.h>

/* Sums the arrays of all ranks. Each element is not 0 on at most one rank; so elements may also be
 * the bits of floats. All ranks must call this. */
void sum_over_ranks(uint32_t *x, uint64_t count);
