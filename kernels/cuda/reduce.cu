/* Sums over all elements, in two kernels. The first kernel computes up to SUM_BLOCKS partial sums,
 * whose number and order depend only on the length. In the second kernel one block adds them. So
 * the same values give the same bits on every GPU.
 *
 * The kernels read each element once. A thread sums eight neighbours in F32. All other sums are in
 * F64. */
#include "kernels/cuda/vector.cuh"

enum { SUM_BLOCKS = 1024, SUM_THREADS = 256, PACKS = 4, COLUMNS = 32, GROUPS = 32 };

/* partial[block] = the sum of x, or of x^2 if SQUARE, over the block's packs. */
template <bool ALIGNED, bool SQUARE, typename T>
__global__ __launch_bounds__(SUM_THREADS) void partial_sums_kernel(double *partial, const T *x,
                                                                   size_t n)
{
    __shared__ double shared[32];
    double total = 0;
    const size_t step = (size_t)gridDim.x * SUM_THREADS * PACKS;
    for (size_t base = (size_t)blockIdx.x * SUM_THREADS * PACKS; 8 * base < n; base += step) {
        Pack<T> pack[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const size_t at = 8 * (base + j * SUM_THREADS + threadIdx.x);
            const int left = at < n ? (int)min(n - at, (size_t)8) : 0;
            pack[j] =
                ALIGNED && left == 8 ? load_pack<true>(x + at, 8) : load_pack<false>(x + at, left);
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            float s = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                s += SQUARE ? pack[j][i] * pack[j][i] : pack[j][i];
            total += s;
        }
    }
    total = block_reduce<Sum>(total, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = total;
}

/* *out += the sum of `partial`. */
__global__ __launch_bounds__(SUM_BLOCKS) void final_sum_kernel(float *out, const double *partial,
                                                               int n)
{
    __shared__ double shared[32];
    const double total = block_reduce<Sum>(threadIdx.x < n ? partial[threadIdx.x] : 0.0, shared);
    if (threadIdx.x == 0)
        *out = (float)(*out + total);
}

template <bool SQUARE, typename T>
static void add_sum(float *out, const T *x, size_t n)
{
    if (n == 0)
        return;
    const size_t needed = ceil_div(n, 8 * SUM_THREADS * PACKS);
    const int blocks = needed < SUM_BLOCKS ? (int)needed : SUM_BLOCKS;
    double *partial = (double *)device_scratch(SUM_BLOCKS * sizeof(double), SCRATCH_0);
    with_bool((uintptr_t)x % 16 == 0, [&](auto aligned) {
        partial_sums_kernel<decltype(aligned)::value, SQUARE>
            <<<blocks, SUM_THREADS, 0, device_stream()>>>(partial, x, n);
    });
    LAUNCH_CHECK();
    final_sum_kernel<<<1, block_threads(blocks, 1, SUM_BLOCKS), 0, device_stream()>>>(out, partial,
                                                                                      blocks);
    LAUNCH_CHECK();
}

void backend_sum_values(float *out, const float *x, size_t n)
{
    add_sum<false>(out, x, n);
}

void backend_sum_squares(float *out, Tensor x)
{
    CHECK_DENSE(x, x.rows, x.cols);
    with_type(x, [&](auto *p) { add_sum<true>(out, p, tensor_numel(x)); });
}

/* ---- the sum and the mean of tensors --------------------------------------------------------- */

/* Adds element by element. The sum takes 6 to 12 bytes of memory traffic per element, once in a
 * step. */
template <typename T, typename X>
__global__ __launch_bounds__(SUM_THREADS) void add_kernel(T *y, const X *x, size_t n)
{
    for (size_t i = (size_t)blockIdx.x * SUM_THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * SUM_THREADS)
        y[i] = from_float<T>(to_float(y[i]) + to_float(x[i]));
}

void backend_accumulate(Tensor y, Tensor x)
{
    CHECK_DENSE(y, x.rows, x.cols);
    CHECK_DENSE(x, x.rows, x.cols);
    const size_t n = tensor_numel(x), needed = ceil_div(n, SUM_THREADS);
    if (n == 0)
        return;
    with_type(y, [&](auto *to) {
        with_type(x, [&](auto *from) {
            add_kernel<<<(unsigned)(needed < 65536 ? needed : 65536), SUM_THREADS, 0,
                         device_stream()>>>(to, from, n);
        });
    });
    LAUNCH_CHECK();
}

/* Averages element by element. The mean takes 10 or 12 bytes of memory traffic per element, once in
 * many steps. */
template <typename T>
__global__ __launch_bounds__(SUM_THREADS) void average_kernel(float *mean, const T *w, size_t n,
                                                              float share)
{
    for (size_t i = (size_t)blockIdx.x * SUM_THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * SUM_THREADS) {
        const float x = to_float(w[i]), m = share == 1 ? 0.f : mean[i];
        mean[i] = share == 1 ? x : m + share * (x - m);
    }
}

void backend_average_weights(Tensor mean, Tensor w, float share)
{
    CHECK_DENSE(mean, w.rows, w.cols);
    CHECK_DENSE(w, w.rows, w.cols);
    CHECK(mean.format.dtype == F32, "average_weights: mean is %s, expected f32",
          format_name(mean.format));
    const size_t n = tensor_numel(w), needed = ceil_div(n, SUM_THREADS);
    if (n == 0)
        return;
    with_type(w, [&](auto *p) {
        average_kernel<<<(unsigned)(needed < 65536 ? needed : 65536), SUM_THREADS, 0,
                         device_stream()>>>((float *)mean.data, p, n, share);
    });
    LAUNCH_CHECK();
}

/* ---- columns --------------------------------------------------------------------------------- */

/* Each block has COLUMNS columns. Thread (c, g) adds rows g, g + GROUPS, ... of its column. Then
 * the sums of the GROUPS threads of a column are added in their order. */
__global__ __launch_bounds__(COLUMNS *GROUPS) void column_sums_kernel(AnyOut sum, bool empty,
                                                                      const float *partial,
                                                                      int rows, size_t stride,
                                                                      int cols)
{
    __shared__ double shared[GROUPS][COLUMNS];
    const int c = threadIdx.x % COLUMNS, g = threadIdx.x / COLUMNS,
              column = blockIdx.x * COLUMNS + c;
    double total = 0;
    if (column < cols)
#pragma unroll 8
        for (int r = g; r < rows; r += GROUPS)
            total += partial[r * stride + column];
    shared[g][c] = total;
    __syncthreads();
    if (g > 0 || column >= cols)
        return;
    total = empty        ? 0.0
            : sum.is_f32 ? ((float *)sum.data)[column]
                         : to_float(((bf16 *)sum.data)[column]);
    for (int k = 0; k < GROUPS; k++)
        total += shared[k][c];
    if (sum.is_f32)
        ((float *)sum.data)[column] = (float)total;
    else
        ((bf16 *)sum.data)[column] = from_float<bf16>((float)total);
}

void add_column_sums(Tensor sum, const float *partial, int rows, size_t stride)
{
    column_sums_kernel<<<(unsigned)ceil_div(sum.cols, COLUMNS), COLUMNS * GROUPS, 0,
                         device_stream()>>>(any_out(sum), sum.empty, partial, rows, stride,
                                            sum.cols);
    LAUNCH_CHECK();
}
