#include "kernels/runtime/mesh.h"

#include "kernels/runtime/error.h"

Mesh mesh_of_context(int ranks, int shard, int context)
{
    CHECK(shard > 0 && ranks % shard == 0, "%d ranks in groups of %d", ranks, shard);
    CHECK(context > 0 && shard % context == 0, "%d ranks in context groups of %d", shard, context);
    return (Mesh){ .size = { [MESH_TENSOR] = 1,
                             [MESH_CONTEXT] = context,
                             [MESH_SHARD] = shard / context,
                             [MESH_HOST] = 1,
                             [MESH_REPLICA] = ranks / shard,
                             [MESH_PIPELINE] = 1 } };
}

Mesh mesh_of_stages(int ranks, int stages, int shard, int context)
{
    CHECK(stages > 0 && ranks % stages == 0, "%d ranks in %d stages", ranks, stages);
    Mesh m = mesh_of_context(ranks / stages, shard, context);
    m.size[MESH_PIPELINE] = stages;
    return m;
}

Mesh mesh_of_tensor(int ranks, int stages, int shard, int context, int tensor)
{
    CHECK(tensor > 0 && ranks % tensor == 0, "%d ranks in tensor groups of %d", ranks, tensor);
    Mesh m = mesh_of_stages(ranks / tensor, stages, shard, context);
    m.size[MESH_TENSOR] = tensor;
    return m;
}

Mesh mesh_of_shards(int ranks, int shard)
{
    return mesh_of_context(ranks, shard, 1);
}

void mesh_cut_at_hosts(Mesh *m, int per_host)
{
    const int each = m->size[MESH_TENSOR] * m->size[MESH_CONTEXT],
              ranks = each * m->size[MESH_SHARD];
    if (per_host % each != 0 || ranks % per_host != 0)
        return;
    m->size[MESH_HOST] = ranks / per_host;
    m->size[MESH_SHARD] = per_host / each;
}

/* Returns the coordinates of `rank` in the dimensions of g as one number, with the dimensions in
 * the same order as in the rank. */
static int number_in(const Mesh *m, int rank, int g)
{
    int number = 0, stride = 1;
    for (MeshDim d = 0; d < MESH_DIMS; rank /= m->size[d], d++) {
        if (g >> d & 1) {
            number += rank % m->size[d] * stride;
            stride *= m->size[d];
        }
    }
    return number;
}

int mesh_ranks(const Mesh *m)
{
    return mesh_group_size(m, RANKS_ALL);
}

int mesh_coordinate(const Mesh *m, int rank, MeshDim d)
{
    for (MeshDim faster = 0; faster < d; faster++)
        rank /= m->size[faster];
    return rank % m->size[d];
}

int mesh_group_size(const Mesh *m, Ranks g)
{
    int n = 1;
    for (MeshDim d = 0; d < MESH_DIMS; d++)
        n *= g >> d & 1 ? m->size[d] : 1;
    return n;
}

int mesh_group_rank(const Mesh *m, int rank, Ranks g)
{
    return number_in(m, rank, g);
}

int mesh_group(const Mesh *m, int rank, Ranks g)
{
    return number_in(m, rank, RANKS_ALL & ~g);
}
