/* The rows of config_keys.c for how ranks share the work (parallelism.*). Only config_keys.c includes
 * it, after config_keys_rows.h. */
#pragma once
#define MESH_ROWS \
    OPTION("parallelism.replicate", INT, "null", 0, 1, MANY, X(fsdp.replicate), \
           "number of HSDP replicas, instead of " \
           "fsdp.hybrid_sharding_num_model_replicas. replicate x shard x context x " \
           "tensor is the number of ranks of a pipeline stage. null: it follows from " \
           "parallelism.shard, or if that is null, too, from fsdp.sharding_strategy"), \
        OPTION("parallelism.shard", INT, "null", 0, 1, MANY, X(fsdp.shard), \
               "number of shards of a replica; parallelism.context multiplies it, " \
               "because weights are sharded over context ranks, too. null: it follows " \
               "from parallelism.replicate, or if that is null, too, from " \
               "fsdp.sharding_strategy"), \
        NUMBER("parallelism.context", INT, "1", 1, 1024, C(strategy.context_ranks), \
               "context parallelism (Ulysses): number of consecutive ranks that share " \
               "each sequence. Each rank has an equal part of the tokens, and in " \
               "attention of the heads. So the number divides n_heads, and it divides " \
               "n_kv_heads or is a multiple of it (then ranks share a key/value head). " \
               "Short documents that lie on one rank are not exchanged. Context ranks " \
               "shard weights together, also with NO_SHARD. With `generate` they only " \
               "shard weights. A run may resume with another number"), \
        NUMBER("parallelism.tensor", INT, "1", 1, 1024, C(strategy.tensor_ranks), \
               "tensor parallelism: number of consecutive ranks that split each linear " \
               "layer of the blocks. Each rank has an equal part of the matrix, of the " \
               "heads and of the MLP's width; between the layers each has an equal part " \
               "of the tokens (sequence parallelism). The number divides n_heads and " \
               "n_kv_heads. A rank's part of a width, and of the tokens, is a multiple " \
               "of 16. fsdp.* and parallelism.context count these ranks as one. A run " \
               "may resume with another number"), \
        NUMBER("parallelism.pipeline", INT, "1", 1, 1024, C(strategy.pipeline_stages), \
               "pipeline parallelism: number of stages. Each stage has consecutive " \
               "blocks on ranks of its own, and micro-batches pass through the stages. " \
               "The first stage has the embedding, the last one the head; with " \
               "model.weight_tying both have that matrix and sum its gradients once per " \
               "step. fsdp.* applies to the ranks of a stage, which gather weights and " \
               "sum gradients once per step. Losses are the same as without stages; with " \
               "model.weight_tying they may differ by rounding, because that sum has " \
               "another order. A run may resume with another number"), \
        WORD("parallelism.pipeline_schedule", CHOICE, "1F1B", schedules, \
             C(strategy.pipeline_schedule), \
             "order of the passes, for p stages, v virtual stages and m micro-batches " \
             "per step. 1F1B: stages alternate between forward and backward and idle " \
             "(p-1)/(m+p-1) of the time. Interleaved1F1B: stages idle (p-1)/(vm+p-1) " \
             "of the time, with more messages and saved activations. Sequential: one " \
             "micro-batch after the other, with the least memory"), \
        NUMBER("parallelism.pipeline_virtual_stages", INT, "1", 1, 1024, \
               C(strategy.pipeline_chunks), \
               "Interleaved1F1B: virtual stages (v), groups of consecutive blocks on " \
               "each stage")
