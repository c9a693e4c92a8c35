/* Factors of the columns of an FP8 operand, which are powers of two. One block chooses the factors.
 * The gradient changes only in columns whose factor differs from 1. The weight that GEMMs read is
 * copied, at 2 bytes per element. */
#include "kernels/cuda/channels.cuh"

enum { CHOOSE_THREADS = 1024, FIELDS = 256, FOLD_THREADS = 256, SPLIT_ROWS = 64 };

float *column_maxima_new(int columns)
{
    const size_t bytes = sizeof(float) * (size_t)columns;
    float *maxima = (float *)device_scratch(bytes, SCRATCH_0);
    CUDA_CHECK(cudaMemsetAsync(maxima, 0, bytes, device_stream()));
    return maxima;
}

__device__ static inline int exponent_field(float x)
{
    return (int)(__float_as_uint(x) >> 23 & 0xff);
}

/* Returns the factor of a column. field: exponent field of the column's maximum. median: median of
 * the exponent fields of all columns. */
__device__ static inline float factor_of(int field, int median)
{
    const int k = min(max(field - median - CHANNEL_EXCESS, 0), (int)CHANNEL_MOST);
    return __uint_as_float((uint32_t)(127 - k) << 23);
}

__global__ __launch_bounds__(CHOOSE_THREADS) void choose_kernel(float *channel, float *amax,
                                                                const float *maxima, int columns)
{
    __shared__ int count[FIELDS], median;
    __shared__ float shared[32];
    for (int i = threadIdx.x; i < FIELDS; i += CHOOSE_THREADS)
        count[i] = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += CHOOSE_THREADS)
        atomicAdd(&count[exponent_field(maxima[c])], 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        const int all = columns - count[0];
        int below = 0, field = 0;
        while (field + 1 < FIELDS && 2 * below < all)
            below += count[++field];
        median = field;
    }
    __syncthreads();
    float m = 0;
    for (int c = threadIdx.x; c < columns; c += CHOOSE_THREADS) {
        const float factor = factor_of(exponent_field(maxima[c]), median);
        channel[c] = factor;
        m = fmaxf(m, maxima[c] * factor);
    }
    m = block_max(m, shared);
    if (threadIdx.x == 0)
        *amax = m;
}

void channels_choose(Tensor act, float *amax, const float *maxima)
{
    choose_kernel<<<1, CHOOSE_THREADS, 0, device_stream()>>>(act.channel, amax, maxima, act.cols);
    LAUNCH_CHECK();
}

/* ---- the gradient ---------------------------------------------------------------------------- */

template <bool DIVIDE, typename T>
__global__ __launch_bounds__(FOLD_THREADS) void scale_columns_kernel(T *x, const float *channel,
                                                                     int rows, int cols)
{
    const int c = blockIdx.x * FOLD_THREADS + threadIdx.x;
    const float factor = c < cols ? channel[c] : 1.0f, by = DIVIDE ? 1.0f / factor : factor;
    if (factor != 1.0f)
        for (int row = blockIdx.y; row < rows; row += gridDim.y)
            x[(size_t)row * cols + c] = from_float<T>(to_float(x[(size_t)row * cols + c]) * by);
}

template <bool DIVIDE>
static void scale_columns(Tensor x, const float *channel)
{
    const dim3 grid((unsigned)ceil_div(x.cols, FOLD_THREADS),
                    x.rows < SPLIT_ROWS ? x.rows : SPLIT_ROWS);
    with_type(x, [&](auto *data) {
        scale_columns_kernel<DIVIDE>
            <<<grid, FOLD_THREADS, 0, device_stream()>>>(data, channel, x.rows, x.cols);
    });
    LAUNCH_CHECK();
}

void channels_multiply(Tensor x, const float *channel)
{
    scale_columns<false>(x, channel);
}

void channels_divide(Tensor x, const float *channel)
{
    scale_columns<true>(x, channel);
}

/* ---- the weight ------------------------------------------------------------------------------ */

__global__ __launch_bounds__(CHOOSE_THREADS) void fold_scale_kernel(float *scale, const float *from,
                                                                    const float *channel,
                                                                    int columns)
{
    __shared__ float shared[32];
    float m = 1;
    for (int c = threadIdx.x; c < columns; c += CHOOSE_THREADS)
        m = fmaxf(m, 1.0f / channel[c]);
    m = block_max(m, shared);
    if (threadIdx.x == 0)
        *scale = *from * m;
}

/* The ratio of the two scales is the least factor. A thread has eight columns of some rows. */
template <DType D>
__global__
__launch_bounds__(FOLD_THREADS) void fold_kernel(uint8_t *to, const float *scale,
                                                 const uint8_t *from, const float *from_scale,
                                                 const float *channel, int rows, int cols)
{
    const int col = 8 * (blockIdx.x * FOLD_THREADS + threadIdx.x);
    if (col >= cols)
        return;
    Factors factors = load_factors(channel, col);
    const float least = *from_scale / *scale;
#pragma unroll
    for (int i = 0; i < 8; i++)
        factors.x[i] = least / factors.x[i];
#pragma unroll 4
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        const size_t at = (size_t)row * cols + col;
        float v[8];
        decode_pack<D>(v, *(const uint2 *)(from + at), 1.0f);
        factors.multiply(v);
        *(uint2 *)(to + at) = encode_pack<D>(v, 1.0f);
    }
}

template <DType D>
static void fold(Tensor y, Tensor w, const float *channel)
{
    const unsigned across = (unsigned)ceil_div(w.cols, 8 * FOLD_THREADS),
                   down = ceil_div(8 * device_sm_count(), across);
    const dim3 grid(across, (unsigned)w.rows < down ? w.rows : down);
    fold_kernel<D><<<grid, FOLD_THREADS, 0, device_stream()>>>(
        (uint8_t *)y.data, (const float *)y.scale, (const uint8_t *)w.data, (const float *)w.scale,
        channel, w.rows, w.cols);
    LAUNCH_CHECK();
}

void backend_fold_channels(Tensor y, Tensor w, const float *channel)
{
    check_fold_channels(y, w);
    check_operand(OPERATION, "w", w, w.rows, w.cols);
    fold_scale_kernel<<<1, CHOOSE_THREADS, 0, device_stream()>>>(
        (float *)y.scale, (const float *)w.scale, channel, w.cols);
    LAUNCH_CHECK();
    if (w.format.dtype == E4M3)
        fold<E4M3>(y, w, channel);
    else
        fold<E5M2>(y, w, channel);
}
