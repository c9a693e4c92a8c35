/* Decides which rank writes which elements. */
#include "model/checkpoint/layout_ranges.h"

#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

/* Ranks that hold the same shard of a region divide the work of writing it: this returns the range
 * of each region that this rank writes. If tensor ranks cut a unit, only ranks with the same tensor
 * rank hold the same shard; the tensor rank is the fastest coordinate of a rank (mesh.h). */
Range *layout_ranges(const ParamStore *store)
{
    const size_t W = (size_t)comm_size(), rank = (size_t)comm_rank(),
                 n = (size_t)store->num_units * NUM_REGIONS;
    Range *range = xcalloc(n, sizeof *range), *all = xmalloc(W * n * sizeof *all);
    for (size_t i = 0; i < n; i++) {
        const Slice *s = &store->shard[i / NUM_REGIONS].slice[i % NUM_REGIONS];
        range[i] = (Range){ s->first, s->first + s->count };
    }
    comm_gather(all, range, n * sizeof *range, RANKS_ALL);

    for (size_t i = 0; i < n; i++) {
        const Range own = range[i];
        const size_t tensor_ranks = (size_t)store->shape[i / NUM_REGIONS].tensor_ranks;
        size_t copies = 0, mine = 0, blocks = (own.end - own.first) / PARAM_ALIGN;
        for (size_t r = rank % tensor_ranks; r < W; r += tensor_ranks) {
            const Range other = all[r * n + i];
            if (other.first != own.first || other.end != own.end)
                continue;
            mine += r < rank;
            copies++;
        }
        range[i].first = own.first + blocks * mine / copies * PARAM_ALIGN;
        range[i].end = own.first + blocks * (mine + 1) / copies * PARAM_ALIGN;
    }
    free(all);
    return range;
}
