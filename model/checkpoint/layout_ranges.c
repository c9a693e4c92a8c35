/* Which rank writes which elements. */
#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/layout.h"

/* Elements of a region that a rank has, of the part of this tensor rank; 0 where the unit is whole on each of them. */
typedef struct { size_t first, end; int place; } Held;

static bool same(Held a, Held b)
{
    return a.first == b.first && a.end == b.end && a.place == b.place;
}

/* This rank's part of its shard of each region, which is divided among the ranks with the same shard. */
Range *layout_ranges(const ParamStore *f)
{
    const size_t W = (size_t)comm_size(), rank = (size_t)comm_rank(), n = (size_t)f->num_units * NUM_REGIONS;
    Range *range = xcalloc(n, sizeof *range);
    Held *held = xcalloc(n, sizeof *held), *all = xcalloc(W * n, sizeof *all);
    for (size_t i = 0; i < n; i++) {
        const size_t u = i / NUM_REGIONS;
        const Slice *s = &f->shard[u].slice[i % NUM_REGIONS];
        held[i].first = s->first;
        held[i].end = s->first + s->count;
        held[i].place = f->shape[u].tensor_ranks > 1 ? f->tensor_place : 0;
    }
    comm_gather(all, held, n * sizeof *held, RANKS_ALL);

    for (size_t i = 0; i < n; i++) {
        size_t copies = 0, mine = 0, blocks = (held[i].end - held[i].first) / PARAM_ALIGN;
        for (size_t r = 0; r < W; r++) {
            if (!same(all[r * n + i], held[i]))
                continue;
            mine += r < rank;
            copies++;
        }
        range[i].first = held[i].first + blocks * mine / copies * PARAM_ALIGN;
        range[i].end = held[i].first + blocks * (mine + 1) / copies * PARAM_ALIGN;
    }
    free(all);
    free(held);
    return range;
}
