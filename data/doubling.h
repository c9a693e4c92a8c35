/* Batch sizes that double during a run. */
#pragma once
#include <stdint.h>

enum { MOST_UNTIL = 16 };

/* The first batch size is batch / 2^count, a whole number. The batch size doubles after until[0],
 * until[1], ... steps (ascending), and is `batch` at the end. */
typedef struct {
    uint64_t batch, until[MOST_UNTIL];
    int count;
} Doubling;

/* The batch size of the step that follows `steps` steps. */
uint64_t doubling_batch(const Doubling *d, uint64_t steps);
/* The sum of the batch sizes of `more` steps, beginning with the step that follows `steps`
 * steps. */
uint64_t doubling_sum(const Doubling *d, uint64_t steps, uint64_t more);
