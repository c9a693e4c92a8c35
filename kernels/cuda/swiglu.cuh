/* SwiGLU's gradients of a few elements. */
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
