/* Definitions that the norms share. A block has one row, whose packs stay in registers from load to
 * store. A block has at most 512 threads, with MAX_PACKS packs each. */
#pragma once
#include "kernels/cuda/vector.cuh"

enum { MAX_PACKS = 4, MAX_THREADS = 512, MAX_WIDTH = 8 * MAX_PACKS * MAX_THREADS };

/* The first of the eight columns of the thread's pack j. */
__device__ static inline int column(int j)
{
    return 8 * (threadIdx.x + j * blockDim.x);
}

/* Returns the number of threads of a block for rows of C elements. Dies if the rows are too
 * wide. */
static inline int norm_threads(const char *op, int C)
{
    if (C > MAX_WIDTH)
        die("%s: rows of %d elements; the CUDA back end has norms up to %d wide", op, C,
            (int)MAX_WIDTH);
    return block_threads((int)ceil_div(C, 8), MAX_PACKS, MAX_THREADS);
}
