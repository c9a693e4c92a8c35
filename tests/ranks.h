/* Start and end of tests that run on several ranks with device collectives. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "model/checkpoint/safetensors.h"
#include "tests/sanitized.h"
#include "model/shape/config.h"

static inline void start_ranks(int *argc, char ***argv)
{
    alarm(SANITIZED ? 1800 : 600); /* if a rank fails, the others wait in a collective */
    comm_start(argc, argv);
    device_init(comm_local_rank());
    comm_init();
}

/* Returns the exit code of all ranks: 1 if any rank has failed. */
static inline int finish_ranks(int failed)
{
    double any = failed;
    comm_max(&any, 1);
    comm_finish();
    return any > 0;
}

static const Strategy ALONE = { .shard_ranks = 1 }; /* each rank has a model of its own */

/* Returns a strategy for all ranks, with these numbers of stages, context ranks and tensor ranks.
 * All further ranks are shards. */
static inline Strategy mesh(int stages, int context, int tensor)
{
    return (Strategy){ .shard_ranks = comm_size() / (stages * tensor),
                       .context_ranks = context,
                       .tensor_ranks = tensor,
                       .pipeline_stages = stages };
}

/* Divides ranks into groups. NOTE: NCCL takes a second per communicator, so tests should rarely
 * change groups. */
static inline void divide(Strategy s)
{
    Mesh m = mesh_of_tensor(comm_size(), pipeline_stages(&s), s.shard_ranks, context_ranks(&s),
                            tensor_ranks(&s));
    if (s.wire != WIRE_NONE)
        mesh_cut_at_hosts(&m, s.ranks_per_host);
    bool same = true;
    for (MeshDim d = 0; d < MESH_DIMS; d++)
        same &= comm_group_size((Ranks)(1 << d)) == m.size[d];
    if (same)
        return;
    comm_device_finish();
    comm_set_mesh(m);
    comm_init();
}

/* A folder that all ranks use, whose files are read in small chunks: setup and teardown of a group
 * of tests. */
static char shared[] = "/tmp/coat-ranks-XXXXXX";

static inline int make_shared(void **state)
{
    (void)state;
    safetensors_chunk = 4096;
    const bool made = comm_rank() != 0 || mkdtemp(shared);
    comm_broadcast(shared, sizeof shared, 0);
    return made ? 0 : -1;
}

static inline int remove_shared(void **state)
{
    (void)state;
    char command[64];
    comm_barrier();
    snprintf(command, sizeof command, "rm -r %s", shared);
    return comm_rank() == 0 ? system(command) : 0;
}
