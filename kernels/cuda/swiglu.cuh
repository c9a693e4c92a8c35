/* SwiGLU's gradients of a few elements, and the rows of kernels over tensors of act. */
#pragma once
#include "kernels/cuda/vector.cuh"

/* QUICK is for results that become FP8. */
template <bool QUICK>
__device__ static inline float sigmoid_for(float x)
{
    return QUICK ? quick_sigmoid(x) : sigmoid(x);
}

/* d is the gradient of act. Replaces gate and up by their gradients, and computes act. */
template <bool QUICK, int N>
__device__ static inline void swiglu_gradients(float (&gate)[N], float (&up)[N], float (&act)[N],
                                               const float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float g = gate[i], s = sigmoid_for<QUICK>(g), gs = g * s;
        act[i] = gs * up[i];
        gate[i] = d[i] * up[i] * s * (1.0f + g * (1.0f - s));
        up[i] = d[i] * gs;
    }
}

/* The rows of a pass: either all rows, with factor 1, or the rows of assignments. The factor of an
 * assignment's row is the assignment's weight; the factor of a padding row is 0. The row's act is
 * multiplied by its factor. */
struct EveryRow {
    __device__ int end(int rows) const
    {
        return rows;
    }
    __device__ float factor(int) const
    {
        return 1;
    }
    __device__ float factor_before(int, int) const
    {
        return 1;
    }
};
struct AssignedRows {
    const int *last; /* the row after the last one in use */
    const int *assignment;
    const float *weight;
    __device__ int end(int) const
    {
        return *last;
    }
    __device__ float factor(int row) const
    {
        const int i = assignment[row];
        return i < 0 ? 0.0f : weight[i];
    }
    /* the same for rows before `end`; 0 for all rows from `end` on */
    __device__ float factor_before(int end, int row) const
    {
        return row < end ? factor(row) : 0.0f;
    }
};
