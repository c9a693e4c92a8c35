#include "data/doubling.h"

uint64_t doubling_batch(const Doubling *d, uint64_t steps)
{
    int halvings = 0;
    for (int i = 0; i < d->count; i++)
        halvings += steps < d->until[i];
    return d->batch >> halvings;
}

uint64_t doubling_sum(const Doubling *d, uint64_t steps, uint64_t more)
{
    const uint64_t end = steps + more;
    uint64_t sum = 0;
    for (int i = 0; i < d->count; i++)
        if (d->until[i] > steps) {
            const uint64_t next = d->until[i] < end ? d->until[i] : end;
            sum += (next - steps) * doubling_batch(d, steps);
            steps = next;
        }
    return sum + (end - steps) * doubling_batch(d, steps);
}
