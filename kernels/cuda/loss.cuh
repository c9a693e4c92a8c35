/* What kernels over rows of logits share: sums of exponentials, and where gradients are written. */
#pragma once
#include <float.h>

#include "kernels/cuda/tiles.cuh"

static constexpr float LOG2E = 1.44269504f;

/* The sum of 2^(base2 x) is total * 2^(base2 max). A Running starts as { -FLT_MAX, 0 }, because -inf minus
 * -inf is NaN. */
struct Running {
    float max, total;
};

/* Adds a pack. left: number of columns of the vocabulary from the pack's first column on. */
template <typename T>
__device__ static inline void add_pack(Running &r, const Pack<T> &pack, int left, float base2)
{
    float x[8], max = r.max;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = pack[i];
    if (left < 8)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i >= left)
                x[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 8; i++)
        max = fmaxf(max, x[i]);
    const float shift = -max * base2;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        total += exp2_quick(fmaf(x[i], base2, shift));
    r.total = r.total * exp2_quick(fmaf(r.max, base2, shift)) + total;
    r.max = max;
}

/* Returns the sum over the block. shared: 32 floats. */
__device__ static inline Running block_total(Running r, float base2, float *shared)
{
    const float max = block_max(r.max, shared);
    const float total = r.total * exp2_quick((r.max - max) * base2);
    return { max, block_sum(total, shared) };
}

/* A Gradient says where gradients are written; begin returns the block's row. InPlace writes them
 * over the logits. */
template <bool ALIGNED, typename T>
struct InPlace {
    __device__ T *begin(T *logits, int) const
    {
        return logits;
    }
    __device__ void store(T *to, const float (&g)[8], int left) const
    {
        store_pack<ALIGNED>(to, g, left);
    }
    __device__ void store_one(T *to, float g) const
    {
        *to = from_float<T>(g);
    }
};

/* Codes writes FP8 codes with the scale of `amax`. Rows of `width` codes are whole packs, even if
 * rows of the logits are not. Codes after the last pack of the logits are 0. */
struct Codes {
    uint8_t *codes;
    float *scale, amax, inverse;
    DType dtype;
    int width;
    template <typename T>
    __device__ uint8_t *begin(T *, int V)
    {
        const float s = fp8_scale(amax, dtype);
        inverse = 1.0f / s;
        if (blockIdx.x == 0 && threadIdx.x == 0)
            *scale = s;
        uint8_t *row = codes + (size_t)blockIdx.x * width;
        for (int c = (V + 7) / 8 * 8 + 8 * threadIdx.x; c < width; c += 8 * blockDim.x)
            *(uint2 *)(row + c) = make_uint2(0, 0);
        return row;
    }
    __device__ void store(uint8_t *to, const float (&g)[8], int left) const
    {
        if (left > 0)
            *(uint2 *)to = encode_pack(g, inverse, dtype);
    }
    __device__ void store_one(uint8_t *to, float g) const
    {
        const float one[8] = { g };
        *to = (uint8_t)encode_pack(one, inverse, dtype).x;
    }
};

template <class Gradient, typename To>
__device__ static inline void store_zeros(const Gradient &gradient, To *row, int V)
{
    const float zero[8] = {};
    for (int c = 8 * threadIdx.x; c < V; c += 8 * blockDim.x)
        gradient.store(row + c, zero, V - c);
}

static inline Codes codes_of(Tensor gradient, float amax)
{
    return { (uint8_t *)gradient.data,
             (float *)gradient.scale,
             amax,
             0,
             gradient.format.dtype,
             gradient.cols };
}

/* Codes of rows after the last row of the logits are 0. */
static inline void clear_padding(Tensor gradient, int rows)
{
    const size_t written = (size_t)rows * gradient.cols;
    backend_device_zero((uint8_t *)gradient.data + written, tensor_numel(gradient) - written);
}

static inline void check_code_rows(const char *op, Tensor gradient)
{
    if (!is_aligned(gradient, gradient.cols) || gradient.cols % 16)
        die("%s: rows of %d codes; expected 16-byte aligned rows of a multiple of 16", op,
            gradient.cols);
}
