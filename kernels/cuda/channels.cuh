/* Factors of the columns of an FP8 operand; see swiglu_forward in kernels.h. */
#pragma once
#include "kernels/cuda/tiles.cuh"

/* The factors of eight neighbouring columns. */
struct Factors {
    float x[8];
    __device__ void multiply(float (&v)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] *= x[i];
    }
};

__device__ inline Factors load_factors(const float *channel, int col)
{
    const float4 a = *(const float4 *)(channel + col), b = *(const float4 *)(channel + col + 4);
    return { { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w } };
}

/* Returns memory for the maxima of all columns, set to 0. The memory is valid until the next
 * call. */
float *column_maxima_new(int columns); /* channels.cu */

/* Sets act.channel from the maxima of columns, and *amax to max|act| with these factors. */
void channels_choose(Tensor act, float *amax, const float *maxima);

enum { COLUMN_THREADS = 128, COLUMN_ROWS = 64 };

/* Raises each of `maxima` to the maximum of its column of the source's output. A block has 8
 * COLUMN_THREADS columns of COLUMN_ROWS rows. */
template <class Source>
__global__ __launch_bounds__(COLUMN_THREADS) void column_maxima_kernel(float *maxima, Source source,
                                                                       int rows, int cols)
{
    const int col = 8 * (blockIdx.x * COLUMN_THREADS + threadIdx.x),
              end = min(rows, (int)(blockIdx.y + 1) * COLUMN_ROWS);
    float m[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    if (col >= cols)
        return;
    const typename Source::Fix fix = source.prepare(col);
#pragma unroll 4
    for (int row = blockIdx.y * COLUMN_ROWS; row < end; row++) {
        float v[1][8];
        source.values(v, source.fetch(row, col), fix, row, col);
#pragma unroll
        for (int i = 0; i < 8; i++)
            m[i] = fmaxf(m[i], fabsf(v[0][i]));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (m[i] > ((volatile float *)maxima)[col + i])
            atomicMax((int *)&maxima[col + i], __float_as_int(m[i]));
}

template <class Source>
static inline const float *column_maxima(const Source &source, int rows, int cols)
{
    float *maxima = column_maxima_new(cols);
    const dim3 grid((unsigned)ceil_div(cols, 8 * COLUMN_THREADS),
                    (unsigned)ceil_div(rows, COLUMN_ROWS));
    column_maxima_kernel<<<grid, COLUMN_THREADS, 0, device_stream()>>>(maxima, source, rows, cols);
    LAUNCH_CHECK();
    return maxima;
}
