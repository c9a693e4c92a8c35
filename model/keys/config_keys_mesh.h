/* The rows of config_keys.c that say how ranks share the work (parallelism.*). Only config_keys.c
 * includes this file, after config_keys_rows.h. */
#pragma once
#define MESH_ROWS \
    OPTION("parallelism.replicate", INT, "null", 0, 1, MANY, X(fsdp.replicate), \
           "number of HSDP replicas, instead of " \
           "fsdp.hybrid_sharding_num_model_replicas. A pipeline stage has replicate " \
           "x shard x context x tensor ranks. null: the number follows from " \
           "parallelism.shard, or if parallelism.shard is null, from " \
           "fsdp.sharding_strategy"), \
        OPTION("parallelism.shard", INT, "null", 0, 1, MANY, X(fsdp.shard), \
               "number of shards of a replica, not counting parallelism.context. With " \
               "context ranks, weights have shard x context shards. null: the number " \
               "follows from parallelism.replicate, or if parallelism.replicate is null, " \
               "from fsdp.sharding_strategy"), \
        NUMBER("parallelism.context", INT, "1", 1, 1024, C(strategy.context_ranks), \
               "context parallelism (Ulysses): number of consecutive ranks that share " \
               "each sequence. Each rank has an equal share of the tokens, and during " \
               "attention an equal share of the heads. So the number must divide " \
               "n_heads. It must also divide n_kv_heads or be a multiple of n_kv_heads; " \
               "in the second case, several ranks share a key/value head. If a short " \
               "document lies on one rank, this rank computes the document's attention " \
               "without communication. FSDP shards weights over context ranks, too, even with " \
               "NO_SHARD. With `generate`, context ranks only shard weights. A run may " \
               "resume with another number"), \
        NUMBER("parallelism.tensor", INT, "1", 1, 1024, C(strategy.tensor_ranks), \
               "tensor parallelism: number of consecutive ranks that split each linear " \
               "layer of the blocks. Each rank has an equal share of the matrix, of the " \
               "heads and of the MLP's width. Between the linear layers, each rank has " \
               "an equal share of the tokens (sequence parallelism). The number must " \
               "divide n_heads and n_kv_heads. A rank's share of a width or of the " \
               "tokens must be a multiple of 16. For fsdp.* and parallelism.context, a " \
               "group of tensor ranks counts as one rank. A run may resume with another " \
               "number"), \
        NUMBER("parallelism.pipeline", INT, "1", 1, 1024, C(strategy.pipeline_stages), \
               "pipeline parallelism: number of stages. Each stage has ranks of its own " \
               "and consecutive blocks. Micro-batches pass through the stages. The first " \
               "stage has the embedding, the last stage the head. With " \
               "model.weight_tying both stages have the shared matrix, and sum its " \
               "gradients once per step. fsdp.* applies to the ranks of one stage, which " \
               "gather weights and sum gradients once per step. Losses are the same as " \
               "without stages, except for rounding with model.weight_tying: the " \
               "gradients of the shared matrix are summed in another order. A run may " \
               "resume with another number"), \
        WORD("parallelism.pipeline_schedule", CHOICE, "1F1B", schedules, \
             C(strategy.pipeline_schedule), \
             "order of forward and backward passes, for p stages, v virtual stages and " \
             "m micro-batches per step. 1F1B: a stage alternates between forward and " \
             "backward passes and is idle for (p-1)/(m+p-1) of the time. Interleaved1F1B: stages " \
             "idle (p-1)/(vm+p-1) of the time, but send more messages and save more " \
             "activations. Sequential: one micro-batch after the other, with the least " \
             "memory"), \
        NUMBER("parallelism.pipeline_virtual_stages", INT, "1", 1, 1024, \
               C(strategy.pipeline_chunks), \
               "Interleaved1F1B: number of virtual stages (v) of each stage. A virtual " \
               "stage is a group of consecutive blocks")
