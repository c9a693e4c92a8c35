#include "model/evaluate/sum_over_ranks.h"

#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

void sum_over_ranks(uint32_t *x, uint64_t count)
{
    enum { PART = 1 << 16 };
    double *part = xmalloc(PART * sizeof *part);
    for (uint64_t at = 0; at < count; at += PART) {
        const int n = count - at < PART ? (int)(count - at) : PART;
        for (int i = 0; i < n; i++)
            part[i] = x[at + (uint64_t)i];
        comm_sum(part, n);
        for (int i = 0; i < n; i++)
            x[at + (uint64_t)i] = (uint32_t)part[i];
    }
    free(part);
}
