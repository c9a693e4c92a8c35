/* Batches that double during a run. */
#pragma once
#include <stdint.h>

enum { MOST_UNTIL = 16 };

/* The first batch is batch / 2^count, a whole number. It doubles after until[0], until[1], ...
 * steps (ascending), until it is `batch`. */
typedef struct {
    uint64_t batch, until[MOST_UNTIL];
    int count;
} Doubling;

/* doubling_batch: the batch of the step that follows `steps` steps. doubling_sum: the sum of the
 * batches of `more` steps from that step on. */
uint64_t doubling_batch(const Doubling *d, uint64_t steps);
uint64_t doubling_sum(const Doubling *d, uint64_t steps, uint64_t more);
