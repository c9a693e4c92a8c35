/* The rows of config_keys.c for how ranks share the work (parallelism.*). Only config_keys.c includes
 * it, after config_keys_rows.h. */
#pragma once
#define MESH_ROWS \
    OPTION("parallelism.replicate", INT, "null", 0, 1, MANY, X(fsdp.replicate), \
           "number of groups of ranks that have the same weights, in place of " \
           "fsdp.hybrid_sharding_num_model_replicas; times " \
           "parallelism.shard, context and tensor it is the number of ranks of a stage. null: " \
           "the ranks that " \
           "parallelism.shard leaves, or as fsdp.sharding_strategy says"), \
        OPTION("parallelism.shard", INT, "null", 0, 1, MANY, X(fsdp.shard), \
               "number of shards of a replica; with parallelism.context it is sharded over shard " \
               "x context ranks. null: the ranks " \
               "that parallelism.replicate leaves, or as fsdp.sharding_strategy says"), \
        NUMBER("parallelism.context", INT, "1", 1, 1024, C(strategy.context_ranks), \
               "number of consecutive ranks that share sequences. Each has an equal part of " \
               "every sequence's tokens, and in " \
               "attention of the heads: so this number divides the number of heads, and divides " \
               "the number of key heads or is a " \
               "multiple of it (then ranks share a key head). Short documents that lie in one " \
               "part are not exchanged. These " \
               "ranks are part of one group of fsdp.sharding_strategy; with NO_SHARD they are a " \
               "group. With `generate` they share " \
               "weights only. A run may resume with another number"), \
        NUMBER("parallelism.tensor", INT, "1", 1, 1024, C(strategy.tensor_ranks), \
               "number of consecutive ranks that compute each linear layer of the blocks " \
               "together, each with an equal part of its " \
               "matrix, of the heads and of the MLP's width; between the layers each has an " \
               "equal part of the tokens. So it must " \
               "divide the numbers of heads and of key heads, and leave multiples of 16 of " \
               "widths and tokens. Together these ranks count " \
               "as one rank of fsdp.* and parallelism.context. A run may resume with another " \
               "number"), \
        NUMBER("parallelism.pipeline", INT, "1", 1, 1024, C(strategy.pipeline_stages), \
               "number of stages, each with consecutive blocks on ranks of its own; " \
               "micro-batches pass them one after the other. The " \
               "first stage has the embedding, the last one the head; with model.weight_tying " \
               "both have that matrix, and add its " \
               "gradients once per step. fsdp.* applies to the ranks of a stage, which gather " \
               "weights and sum gradients once per step." \
               " Losses are those of the same micro-batches without stages; with " \
               "model.weight_tying only that sum's order differs. A " \
               "run may resume with another number"), \
        WORD("parallelism.pipeline_schedule", CHOICE, "1F1B", schedules, \
             C(strategy.pipeline_schedule), \
             "order of the passes. 1F1B: stages alternate between forward and backward; p stages " \
             "and m micro-batches a step wait " \
             "(p-1)/(m+p-1) of the time. Interleaved1F1B: each stage has v rows of blocks and " \
             "waits (p-1)/(vm+p-1), with more " \
             "messages and saved activations. Sequential: one micro-batch after the other, with " \
             "the least memory"), \
        NUMBER("parallelism.pipeline_virtual_stages", INT, "1", 1, 1024, \
               C(strategy.pipeline_chunks), \
               "rows of consecutive blocks that each stage has: v of Interleaved1F1B")
