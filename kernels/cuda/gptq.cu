/* The operations of GPTQ. */
#include "kernels/cuda/vector.cuh"

/* ---- the factor ------------------------------------------------------------------------------ */

enum {
    THREADS = 256,
    FACTOR_THREADS = 512,
    SOLVE_THREADS = 64,
    ROWS = 16,
    WARP = 32,
    PITCH = GPTQ_COLUMNS + 1
};

__global__ void gptq_diagonal_kernel(float *diagonal, const float *h, int I)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < I)
        diagonal[i] = h[(size_t)i * I + i];
}

void backend_gptq_diagonal(float *diagonal, Tensor h)
{
    gptq_check_f32(OPERATION, h, h.rows, h.rows);
    gptq_diagonal_kernel<<<(unsigned)ceil_div(h.rows, THREADS), THREADS, 0, device_stream()>>>(
        diagonal, (const float *)h.data, h.rows);
    LAUNCH_CHECK();
}

/* The blocks with blockIdx.y = i compute row i of m. */
__global__ void gptq_damp_kernel(float *m, const float *h, const int *order, float damping, int I)
{
    const int i = blockIdx.y, j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= I)
        return;
    const float value = h[(size_t)order[i] * I + order[j]];
    m[(size_t)i * I + j] = -(i == j ? value + damping : value);
}

void backend_gptq_damp(Tensor m, Tensor h, const int *order, float damping)
{
    gptq_check_f32(OPERATION, h, h.rows, h.rows);
    gptq_check_f32(OPERATION, m, h.rows, h.rows);
    const dim3 blocks((unsigned)ceil_div(h.rows, THREADS), (unsigned)h.rows);
    gptq_damp_kernel<<<blocks, THREADS, 0, device_stream()>>>(
        (float *)m.data, (const float *)h.data, order, damping, h.rows);
    LAUNCH_CHECK();
}

/* One thread block factors the diagonal square in shared memory, with s[i][k] at s[i * PITCH + k].
 * From the last column to the first, it divides a column by the root of the pivot and subtracts the
 * column's products from the rest. */
__global__ __launch_bounds__(FACTOR_THREADS) void gptq_square_kernel(float *c, int *failed,
                                                                     const float *m, int R, int I,
                                                                     int first)
{
    extern __shared__ float s[];
    for (int i = threadIdx.x; i < R * R; i += FACTOR_THREADS)
        s[i / R * PITCH + i % R] = -m[(size_t)(i / R) * I + first + i % R];
    __syncthreads();
    for (int r = R - 1; r >= 0; r--) {
        const float pivot = s[r * PITCH + r], root = sqrtf(pivot);
        __syncthreads(); /* all threads have read the pivot */
        if ((int)threadIdx.x < r)
            s[threadIdx.x * PITCH + r] /= root;
        if (threadIdx.x == 0) {
            s[r * PITCH + r] = root;
            if (!(pivot > 0 && pivot < INFINITY))
                *failed = 1;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < r * r; i += FACTOR_THREADS)
            if (i / r <= i % r)
                s[i / r * PITCH + i % r] -= s[i / r * PITCH + r] * s[i % r * PITCH + r];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < R * R; i += FACTOR_THREADS) {
        const int row = i / R, k = i % R;
        c[(size_t)row * I + first + k] = k <= row ? s[k * PITCH + row] : 0.0f;
    }
}

/* Each thread solves one column before the square, from the last row to the first. Columns after
 * the square become 0. In shared memory the thread's x comes after the square. */
__global__ __launch_bounds__(SOLVE_THREADS) void gptq_solve_kernel(float *c, const float *m, int R,
                                                                   int I, int first)
{
    extern __shared__ float s[];
    float *x = s + GPTQ_COLUMNS * GPTQ_COLUMNS + threadIdx.x;
    const int begin = blockIdx.x * SOLVE_THREADS, col = begin + threadIdx.x;
    /* all threads of a block take the same branch */
    if (begin < first)
        for (int i = threadIdx.x; i < R * R; i += SOLVE_THREADS)
            s[i] = c[(size_t)(i / R) * I + first + i % R]; /* C_kr is s[r * R + k] */
    __syncthreads();
    if (col >= first + R && col < I)
        for (int r = 0; r < R; r++)
            c[(size_t)r * I + col] = 0;
    if (col >= first)
        return;
    for (int r = R - 1; r >= 0; r--) {
        float left = -m[(size_t)r * I + col];
#pragma unroll 8
        for (int k = r + 1; k < R; k++)
            left -= s[k * R + r] * x[k * SOLVE_THREADS];
        x[r * SOLVE_THREADS] = left / s[r * R + r];
        c[(size_t)r * I + col] = x[r * SOLVE_THREADS];
    }
}

template <typename Kernel>
static void allow_shared(Kernel *kernel, size_t bytes)
{
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

void backend_gptq_factor(Tensor c, int *failed, Tensor m, int first)
{
    gptq_check_rows(OPERATION, m, first);
    gptq_check_f32(OPERATION, c, m.rows, m.cols);
    const size_t square = sizeof(float) * GPTQ_COLUMNS * PITCH;
    const size_t solve = sizeof(float) * GPTQ_COLUMNS * (GPTQ_COLUMNS + SOLVE_THREADS);
    allow_shared(gptq_square_kernel, square);
    allow_shared(gptq_solve_kernel, solve);
    gptq_square_kernel<<<1, FACTOR_THREADS, square, device_stream()>>>(
        (float *)c.data, failed, (const float *)m.data, m.rows, m.cols, first);
    LAUNCH_CHECK();
    gptq_solve_kernel<<<(unsigned)ceil_div(m.cols, SOLVE_THREADS), SOLVE_THREADS, solve,
                        device_stream()>>>((float *)c.data, (const float *)m.data, m.rows, m.cols,
                                           first);
    LAUNCH_CHECK();
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* A warp has one row. Its lane l has the columns l, l + 32, ..., with their weights, scales and
 * sums so far in registers. All lanes compute the code of one of their columns. The lane that has
 * the next column sends the error of this column to the others. C_jk is c[j * PITCH + k] in shared
 * memory. */
__global__ __launch_bounds__(ROWS *WARP) void gptq_columns_kernel(
    int8_t *q, AnyOut values, float *e, const float *w, const float *scale, const float *sums,
    const float *ct, const int *order, int O, int I, int group, int first, int count)
{
    enum { EACH = GPTQ_COLUMNS / WARP };
    extern __shared__ float c[];
    const int lane = threadIdx.x % WARP, row = blockIdx.x * ROWS + threadIdx.x / WARP;
    for (int i = threadIdx.x; i < count * count && ct; i += ROWS * WARP)
        c[i % count * PITCH + i / count] = ct[(size_t)(i / count) * I + first + i % count];
    __syncthreads();
    if (row >= O)
        return;
    float weight[EACH], s[EACH], sum[EACH], diagonal[EACH];
    int column[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int k = i * WARP + lane;
        const bool is_there = k < count;
        column[i] = is_there ? order[first + k] : 0;
        weight[i] = is_there ? w[(size_t)row * I + column[i]] : 0.0f;
        s[i] = is_there ? scale[(size_t)row * (I / group) + column[i] / group] : 1.0f;
        sum[i] = is_there && ct ? sums[(size_t)row * count + k] : 0.0f;
        diagonal[i] = is_there && ct ? c[k * PITCH + k] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float code = 0, value = 0, error = 0;
        for (int l = 0; l < WARP && i * WARP + l < count; l++) {
            const float next =
                fminf(fmaxf(rintf((weight[i] + sum[i] / diagonal[i]) / s[i]), -8.0f), 7.0f);
            const float rest = weight[i] - next * s[i], told = __shfl_sync(0xffffffffu, rest, l);
            if (lane == l)
                code = next, value = next * s[i], error = rest;
#pragma unroll
            for (int later = i; later < EACH; later++) {
                const int k = later * WARP + lane;
                if (k > i * WARP + l && k < count && ct)
                    sum[later] += told * c[(i * WARP + l) * PITCH + k];
            }
        }
        if (i * WARP + lane < count) {
            const size_t at = (size_t)row * I + column[i];
            q[at] = (int8_t)code;
            if (values.is_f32)
                ((float *)values.data)[at] = value;
            else
                ((bf16 *)values.data)[at] = from_float<bf16>(value);
            e[(size_t)row * I + first + i * WARP + lane] = error;
        }
    }
}

void backend_gptq_columns(int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c,
                          int first, int count)
{
    gptq_check_columns(OPERATION, values, e, w, sums, c, first, count);
    const size_t shared = c.data ? sizeof(float) * GPTQ_COLUMNS * PITCH : 0;
    const unsigned blocks = (unsigned)ceil_div(w.w.rows, ROWS);
    allow_shared(gptq_columns_kernel, shared);
    gptq_columns_kernel<<<blocks, ROWS * WARP, shared, device_stream()>>>(
        q, any_out(values), (float *)e.data, (const float *)w.w.data, w.scale,
        (const float *)sums.data, (const float *)c.data, w.order, w.w.rows, w.w.cols, w.group,
        first, count);
    LAUNCH_CHECK();
}
