/* The rows of table.c for the numbers of replicas and shards. Only table.c includes it, after table_rows.h. */
#pragma once
#define MESH_ROWS \
    OPTION("parallelism.replicate", INT, "null", 0, 1, MANY, X(fsdp.replicate), \
           "number of groups of ranks that have the same weights, in place of fsdp.hybrid_sharding_num_model_replicas; times " \
           "parallelism.shard, context and tensor it is the number of ranks of a stage. null: the ranks that " \
           "parallelism.shard leaves, or as fsdp.sharding_strategy says"), \
    OPTION("parallelism.shard", INT, "null", 0, 1, MANY, X(fsdp.shard), \
           "number of ranks, with parallelism.context times that number, over which a replica is sharded. null: the ranks that " \
           "parallelism.replicate leaves, or as fsdp.sharding_strategy says")
