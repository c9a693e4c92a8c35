/* The rows of table.c for ranks that share sequences, or layers. Only table.c includes it, after table_rows.h. */
#pragma once
#define SHARING_ROWS \
    NUMBER("parallelism.context", INT, "1", 1, 1024, C(strategy.context_ranks), \
           "number of consecutive ranks that share sequences. Each has an equal part of the tokens of every sequence, and in " \
           "attention an equal part of the heads, so it must divide the number of heads. It divides that of key heads or is a " \
           "multiple of it: then several ranks have the same key head. These ranks are part of one group of " \
           "fsdp.sharding_strategy; with NO_SHARD they are a group. A run may resume with another number"), \
    NUMBER("parallelism.tensor", INT, "1", 1, 1024, C(strategy.tensor_ranks), \
           "number of consecutive ranks that compute each linear layer of the blocks together, each with an equal part of its " \
           "matrix, of the heads and of the MLP's width; between the layers each has an equal part of the tokens. They stand in " \
           "place of each rank of fsdp.* and parallelism.context. A run may resume with another number")
