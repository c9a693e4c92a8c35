/* The row of table.c for ranks that compute layers together. Only table.c includes it, after table_rows.h. */
#pragma once
#define TENSOR_ROWS \
    NUMBER("parallelism.tensor", INT, "1", 1, 1024, C(strategy.tensor_ranks), \
           "number of consecutive ranks that compute each linear layer of the blocks together, each with an equal part of its " \
           "matrix, of the heads and of the MLP's width; between the layers each has an equal part of the tokens. They stand in " \
           "place of each rank of fsdp.* and parallelism.context. A run may resume with another number")
