/* Rows of images: GELU between the two layers of the projector, and copies of rows between the
 * residual stream and a list of rows.
 *
 * Bytes per element in BF16: gelu_forward takes 4, gelu_backward 6, place_rows 4, and take_rows,
 * which also writes zeros, 6. A thread reads element i of its inputs before it writes element i of
 * its output, so dx may be dy. */
#include "kernels/cuda/vector.cuh"

enum { THREADS = 256, MAX_THREADS = 128 };

__device__ static inline float probability(float x)
{
    return 0.5f * (1 + erff(x * 0.70710678f));
}

template <typename T>
__global__ __launch_bounds__(THREADS) void gelu_kernel(AnyOut y, const T *x, size_t n)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    const int left = at < n ? (int)min(n - at, (size_t)8) : 0;
    const Pack<T> in = load_pack(x + at, left);
    float out[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        out[i] = in[i] * probability(in[i]);
    store_any(y, at, out, left);
}

template <typename TY, typename TX>
__global__ __launch_bounds__(THREADS) void gelu_backward_kernel(AnyOut dx, const TY *dy,
                                                                const TX *x, size_t n)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    const int left = at < n ? (int)min(n - at, (size_t)8) : 0;
    const Pack<TX> in = load_pack(x + at, left);
    const Pack<TY> gradient = load_pack(dy + at, left);
    float out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float v = in[i];
        out[i] = gradient[i] * (probability(v) + v * 0.39894228f * expf(-0.5f * v * v));
    }
    store_any(dx, at, out, left);
}

void backend_gelu_forward(Tensor y, Tensor x)
{
    CHECK_DENSE(x, x.rows, x.cols);
    CHECK_DENSE(y, x.rows, x.cols);
    check_aligned(OPERATION, x.cols, y, x);
    const size_t n = tensor_numel(x);
    if (n == 0)
        return;
    with_type(x, [&](auto *in) {
        gelu_kernel<<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0, device_stream()>>>(any_out(y),
                                                                                         in, n);
    });
    LAUNCH_CHECK();
}

void backend_gelu_backward(Tensor dx, Tensor dy, Tensor x)
{
    CHECK_DENSE(x, x.rows, x.cols);
    CHECK_DENSE(dy, x.rows, x.cols);
    CHECK_DENSE(dx, x.rows, x.cols);
    check_aligned(OPERATION, x.cols, dx, dy, x);
    const size_t n = tensor_numel(x);
    if (n == 0)
        return;
    with_type(x, [&](auto *in) {
        with_type(dy, [&](auto *gradient) {
            gelu_backward_kernel<<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0,
                                   device_stream()>>>(any_out(dx), gradient, in, n);
        });
    });
    LAUNCH_CHECK();
}

/* ---- copies of rows
 * ---------------------------------------------------------------------------- */

/* Each block copies one row of x. */
template <typename T>
__global__ __launch_bounds__(MAX_THREADS) void place_rows_kernel(AnyOut y, const int *at,
                                                                 const T *x, int C)
{
    const int y_row = at[blockIdx.x];
    for (int c = 8 * threadIdx.x; c < C && y_row >= 0; c += 8 * blockDim.x) {
        const Pack<T> in = load_pack(x + (size_t)blockIdx.x * C + c, C - c);
        float row[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            row[i] = in[i];
        store_any(y, (size_t)y_row * C + c, row, C - c);
    }
}

template <typename T>
__global__ __launch_bounds__(MAX_THREADS) void take_rows_kernel(AnyOut x, const int *at, T *y,
                                                                int C)
{
    const int y_row = at[blockIdx.x];
    for (int c = 8 * threadIdx.x; c < C; c += 8 * blockDim.x) {
        const Pack<T> in =
            load_pack((const T *)y + (size_t)max(y_row, 0) * C + c, y_row >= 0 ? C - c : 0);
        const float zero[8] = {};
        float row[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            row[i] = in[i];
        store_any(x, (size_t)blockIdx.x * C + c, row, C - c);
        store_pack(y + (size_t)max(y_row, 0) * C + c, zero, y_row >= 0 ? C - c : 0);
    }
}

void backend_place_rows(Tensor y, const int *at, Tensor x)
{
    const int C = x.cols, threads = block_threads((int)ceil_div(C, 8), 1, MAX_THREADS);
    CHECK_DENSE(x, x.rows, C);
    CHECK_DENSE(y, y.rows, C);
    check_aligned(OPERATION, C, y, x);
    if (x.rows == 0)
        return;
    with_type(x, [&](auto *in) {
        place_rows_kernel<<<x.rows, threads, 0, device_stream()>>>(any_out(y), at, in, C);
    });
    LAUNCH_CHECK();
}

void backend_take_rows(Tensor x, const int *at, Tensor y)
{
    const int C = x.cols, threads = block_threads((int)ceil_div(C, 8), 1, MAX_THREADS);
    CHECK_DENSE(x, x.rows, C);
    CHECK_DENSE(y, y.rows, C);
    check_aligned(OPERATION, C, x, y);
    if (x.rows == 0)
        return;
    with_type(y, [&](auto *in) {
        take_rows_kernel<<<x.rows, threads, 0, device_stream()>>>(any_out(x), at, in, C);
    });
    LAUNCH_CHECK();
}
