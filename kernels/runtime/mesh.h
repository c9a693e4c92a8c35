/* The ranks of a run as a grid. A rank has a coordinate in each of six dimensions, and the product
 * of their sizes is the number of ranks. Neighbouring ranks differ in the tensor coordinate first,
 * then in context, shard, host, replica and pipeline, so that ranks with the most traffic are on
 * one host:
 *
 *     rank = ((((pipeline R + replica) H + host) S + shard) C + context) T + tensor
 *                                                                       (R, H, S, C, T: sizes)
 *
 * A group consists of all ranks that differ only in some dimensions. In the example below, 8 ranks
 * hold 2 replicas of 4 shards. A row is a group of RANKS_SHARD, a column a group of RANKS_REPLICA:
 *
 *                  shard 0   1   2   3
 *     replica 0          0   1   2   3       one copy of the model, cut into four shards
 *     replica 1          4   5   6   7       another copy; ranks 0 and 4 hold the same shard */
#pragma once

typedef enum {
    MESH_TENSOR,
    MESH_CONTEXT,
    MESH_SHARD,
    MESH_HOST, /* cuts the shards of a group by hosts (mesh_cut_at_hosts); else its size is 1 */
    MESH_REPLICA,
    MESH_PIPELINE,
    MESH_DIMS
} MeshDim;

typedef struct {
    int size[MESH_DIMS];
} Mesh;

/* A set of dimensions (bit d is dimension d). The set divides the ranks into groups; the ranks of a
 * group differ only in these dimensions. A comment behind a set says what the ranks of one group
 * do. */
typedef enum {
    RANKS_REPLICA = 1 << MESH_REPLICA,
    RANKS_CONTEXT = 1 << MESH_CONTEXT,                /* divide the tokens of each sequence */
    RANKS_NEAR = 1 << MESH_SHARD | 1 << MESH_CONTEXT, /* the ranks of RANKS_SHARD on one host */
    RANKS_HOSTS = 1 << MESH_HOST,                     /* one rank of each host of RANKS_SHARD */
    RANKS_SHARD = RANKS_NEAR | RANKS_HOSTS,           /* weights are sharded over context, too */
    /* read different sequences */
    RANKS_DATA = 1 << MESH_REPLICA | 1 << MESH_HOST | 1 << MESH_SHARD,
    RANKS_TENSOR = 1 << MESH_TENSOR,          /* compute the layers of a block together */
    RANKS_STAGE = RANKS_SHARD | RANKS_TENSOR, /* together hold one copy of a pipeline stage */
    RANKS_PIPELINE = 1 << MESH_PIPELINE,      /* one rank of each stage, in the order of stages */
    /* read the same sequences */
    RANKS_SEQUENCE = 1 << MESH_PIPELINE | 1 << MESH_CONTEXT | 1 << MESH_TENSOR,
    RANKS_COPY = 1 << MESH_PIPELINE | RANKS_STAGE, /* together hold one copy of the model */
    RANKS_ALL = (1 << MESH_DIMS) - 1
} Ranks;

/* Meshes of `ranks` ranks. Each function adds a dimension to the mesh of the function before it.
 * Each size must divide the number of ranks that it groups.
 *   mesh_of_shards   `shard` consecutive ranks hold one copy of the model
 *   mesh_of_context  of these, `context` consecutive ranks share sequences
 *   mesh_of_stages   the ranks are first divided into `stages` consecutive groups
 *   mesh_of_tensor   groups of `tensor` consecutive ranks take the place of single ranks */
Mesh mesh_of_shards(int ranks, int shard);
Mesh mesh_of_context(int ranks, int shard, int context);
Mesh mesh_of_stages(int ranks, int stages, int shard, int context);
Mesh mesh_of_tensor(int ranks, int stages, int shard, int context, int tensor);
/* If the ranks of RANKS_SHARD fill several hosts of `per_host` consecutive ranks, cuts their shards
 * by hosts. */
void mesh_cut_at_hosts(Mesh *m, int per_host);
int mesh_ranks(const Mesh *m);                           /* the product of the sizes */
int mesh_coordinate(const Mesh *m, int rank, MeshDim d); /* 0 .. size[d] - 1 */

/* Properties of the group of `rank` in dimensions g: its number of ranks, the index of `rank` in it
 * (in the order of ranks), and a number that is unique among the groups of g. */
int mesh_group_size(const Mesh *m, Ranks g);
int mesh_group_rank(const Mesh *m, int rank, Ranks g);
int mesh_group(const Mesh *m, int rank, Ranks g);
