/* Batches that double during a run. */
#pragma once
#include <stdint.h>

enum { MOST_UNTIL = 16 };

/* The first batch is batch / 2^count, a whole number; it doubles after until[0], until[1], ...
 * steps (ascending), up to `batch`. */
typedef struct {
    uint64_t batch, until[MOST_UNTIL];
    int count;
} Doubling;

/* The batch of the step after `steps` steps; the sum of the batches of the `more` steps from there
 * on. */
uint64_t doubling_batch(const Doubling *d, uint64_t steps);
uint64_t doubling_sum(const Doubling *d, uint64_t steps, uint64_t more);
