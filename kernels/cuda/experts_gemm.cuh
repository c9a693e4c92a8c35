/* Grouped GEMMs: out = a bT for the operands of every expert. The rows of a are rows of out, and the
 * rows of b are columns of out.
 *
 *     matmul      y (R,O)  a = x (R,C), by rows             b = w[e] (O,C)
 *     matmul_dx   dx (R,C) a = dy (R,O), by rows            b = w[e]T (C,O)
 *     matmul_dw   dw[e] (O,C) += a = dy[e]T (O,rows of e)   b = x[e]T (C,rows of e) */
#pragma once
#include "kernels/cuda/vector.cuh"

enum { MOST_EXPERTS = 256 }; /* maximum number of experts, whose first rows fit in shared memory */

typedef enum { GROUPED_MATMUL, GROUPED_DX, GROUPED_DW } GroupedKind;

/* The tensors of an operation: a is x, dy or dy; b is w, w or x. */
struct GroupedGemm {
    GroupedKind kind;
    Tensor out, a, b;
    Routing r;
};

/* Returns the number of columns of out, and the number of rows of an expert in dw. */
static inline int grouped_columns(const GroupedGemm &g)
{
    return g.out.cols;
}
static inline int grouped_rows(const GroupedGemm &g)
{
    return g.kind == GROUPED_DW ? g.a.cols : g.out.rows;
}

/* Returns the expert of a row below first[experts]. */
__device__ inline int expert_of(const int *first, int experts, int row)
{
    int low = 0, high = experts;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* experts_store.cu and experts_sm90.cu: return false, without doing anything, if their kernel does not
 * support the operands. */
bool grouped_gemm_fused(const GroupedGemm &g);
bool grouped_gemm_sm90(const GroupedGemm &g);
