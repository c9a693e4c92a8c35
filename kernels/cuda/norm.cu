/* RMSNorm and LayerNorm. One block per row, which stays in registers from load to store; at most 512 threads with
 * MAX_PACKS packs each, hence C <= 16384.
 *
 * Bytes per element in BF16: forward 4 (stream, y), +2 if x is another tensor, +2 with a residual; backward 6 (dy,
 * x, dx), +2 if dx accumulates. The weight comes from L1, the statistics are 8 bytes a row.
 * Rounding: sums are F32 trees instead of the specification's F64. dw: each block sums its rows in registers and
 * writes C floats of scratch; their sum in the order of the blocks is in F64. The number of blocks depends on the
 * GPU only. */
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/vector.cuh"

enum { MAX_PACKS = 4, MAX_THREADS = 512, MAX_WIDTH = 8 * MAX_PACKS * MAX_THREADS, BLOCKS_PER_SM = 4 };

/* Columns of the thread's pack j: 8 from here on. */
__device__ static inline int column(int j)
{
    return 8 * (threadIdx.x + j * blockDim.x);
}

/* ---- forward ------------------------------------------------------------------------------------------------- */

/* NOTE: rows are latency, so several must be in flight on an SM: the BF16 variants are held to 64 registers, 8 rows
 * of 4096. With both kinds of norm in one kernel, or without keep_packed, that spills. */
template <bool ALIGNED, bool CENTER, typename TS, typename TR>
__global__ __launch_bounds__(MAX_THREADS, sizeof(TS) + sizeof(TR) == 4 ? 2 : 1)
void norm_forward_kernel(AnyOut y, AnyOut x, float2 *stats, const TS *stream, AnyIn w, const TR *residual, int C,
                         float eps)
{
    __shared__ float shared[32];
    const size_t row = (size_t)blockIdx.x * C;
    Pack<TS> in[MAX_PACKS];
    Pack<TR> add[MAX_PACKS];
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        in[j] = load_pack<ALIGNED>(stream + row + column(j), C - column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        add[j] = load_pack<ALIGNED>(residual + row + column(j), residual ? C - column(j) : 0);

    float mean = 0, square = 0;
    if (CENTER) {                       /* what lies behind column C is 0 */
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                mean += as_stored(x, in[j], i);
        mean = block_sum(mean, shared) / C;
        keep_packed(in);
    }
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float d = as_stored(x, in[j], i) - mean;
            square += column(j) + (ALIGNED ? 0 : i) < C ? d * d : 0.0f;
        }
    const float rstd = 1.0f / sqrtf(block_sum(square, shared) / C + eps);
    keep_packed(in);

    if (threadIdx.x == 0)
        stats[blockIdx.x] = make_float2(mean, rstd);
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float v[8], weight[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = as_stored(x, in[j], i);
        if (x.data)
            store_any<ALIGNED>(x, row + column(j), v, C - column(j));
        if (w.data)
            load_any<ALIGNED>(weight, w, column(j), C - column(j));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (v[i] - mean) * rstd * (w.data ? weight[i] : 1.0f);
            v[i] += add[j][i];
        }
        store_any<ALIGNED>(y, row + column(j), v, C - column(j));
    }
}

static void check_width(const char *op, int C)
{
    if (C > MAX_WIDTH)
        die("%s: rows of %d elements; the CUDA back end has norms up to %d wide", op, C, (int)MAX_WIDTH);
}

void norm_forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm)
{
    const int N = stream.rows, C = stream.cols;
    if (format_is_fp8(y.format) || format_is_fp8(x.format)) {
        norm_forward_fp8(y, x, stats, stream, w, residual, norm);
        return;
    }
    CHECK_DENSE(stream, N, C);
    CHECK_DENSE(x, N, C);
    CHECK_DENSE(y, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    CHECK_DENSE_OPTIONAL(residual, N, C);
    check_width(__func__, C);
    AnyOut stored = any_out(x);
    if (x.data == stream.data) {
        CHECK(format_equal(x.format, stream.format), "norm_forward: x and stream share memory, not their format");
        stored.data = NULL;
    }
    if (!residual.data)
        residual.format = stream.format;        /* the variant with the fewest registers */
    const bool aligned = is_aligned(y, C) && is_aligned(x, C) && is_aligned(stream, C) && is_aligned(w, C) &&
                         is_aligned(residual, C);
    const int threads = block_threads((int)ceil_div(C, 8), MAX_PACKS, MAX_THREADS);
    if (N == 0)
        return;
    with_bool(aligned, [&](auto is_aligned) {
        with_bool(norm.kind == LAYER_NORM, [&](auto center) {
            with_type(stream, [&](auto *in) {
                with_type(residual, [&](auto *add) {
                    norm_forward_kernel<decltype(is_aligned)::value, decltype(center)::value>
                        <<<N, threads, 0, device_stream()>>>(any_out(y), stored, (float2 *)stats, in, any_in(w), add,
                                                             C, norm.eps);
                });
            });
        });
    });
    LAUNCH_CHECK();
}

/* ---- y again ------------------------------------------------------------------------------------------------- */

template <bool ALIGNED, typename TX> __global__ __launch_bounds__(MAX_THREADS)
void norm_again_kernel(AnyOut y, const TX *x, const float2 *stats, AnyIn w, int C)
{
    const size_t row = (size_t)blockIdx.x * C;
    const float2 s = stats[blockIdx.x];
    Pack<TX> in[MAX_PACKS];
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        in[j] = load_pack<ALIGNED>(x + row + column(j), C - column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float v[8], weight[8];
        if (w.data)
            load_any<ALIGNED>(weight, w, column(j), C - column(j));
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = (in[j][i] - s.x) * s.y * (w.data ? weight[i] : 1.0f);
        store_any<ALIGNED>(y, row + column(j), v, C - column(j));
    }
}

void norm_again(Tensor y, Tensor x, const float *stats, Tensor w)
{
    const int N = x.rows, C = x.cols;
    if (format_is_fp8(y.format) || format_is_fp8(x.format)) {
        norm_again_fp8(y, x, stats, w);
        return;
    }
    CHECK_DENSE(x, N, C);
    CHECK_DENSE(y, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    check_width(__func__, C);
    if (N == 0)
        return;
    with_bool(is_aligned(y, C) && is_aligned(x, C) && is_aligned(w, C), [&](auto aligned) {
        with_type(x, [&](auto *in) {
            const int threads = block_threads((int)ceil_div(C, 8), MAX_PACKS, MAX_THREADS);
            norm_again_kernel<decltype(aligned)::value><<<N, threads, 0, device_stream()>>>(
                any_out(y), in, (const float2 *)stats, any_in(w), C);
        });
    });
    LAUNCH_CHECK();
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* partial: (gridDim.x, C) sums of dy xh over the block's rows, or NULL. Rows of dx are written where nothing else
 * reads them any more, so dx may be dy. Registers hold one row; the block's next one comes to L2 meanwhile. */
template <bool ALIGNED, typename TX, typename TDY, typename TDX> __global__ __launch_bounds__(MAX_THREADS)
void norm_backward_kernel(TDX *dx, float *partial, const TDY *dy, const TX *x, const float2 *stats, AnyIn w, int N,
                          int C, Norm norm, bool accumulate)
{
    __shared__ float shared[64];
    float dw[MAX_PACKS][8] = {};
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        const size_t row = (size_t)n * C;
        const float2 s = stats[n];
        Pack<TDY> d[MAX_PACKS];
        Pack<TX> in[MAX_PACKS];
        Pack<TDX> before[MAX_PACKS];
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            d[j] = load_pack<ALIGNED>(dy + row + column(j), C - column(j));
            in[j] = load_pack<ALIGNED>(x + row + column(j), C - column(j));
        }
        if (ALIGNED && threadIdx.x == 0 && n + gridDim.x < N) {
            const size_t next = row + (size_t)gridDim.x * C;
            prefetch(dy + next, C * sizeof *dy);
            prefetch(x + next, C * sizeof *x);
            if (accumulate)
                prefetch(dx + next, C * sizeof *dx);
        }
        float sums[2] = {};             /* of g and g xh; dy is 0 behind column C */
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            float weight[8];
            if (w.data)
                load_any<ALIGNED>(weight, w, column(j), C - column(j));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float xh = (in[j][i] - s.x) * s.y, g = w.data ? d[j][i] * weight[i] : d[j][i];
                sums[0] += g;
                sums[1] += g * xh;
                dw[j][i] += d[j][i] * xh;
            }
        }
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++)
            before[j] = load_pack<ALIGNED>(dx + row + column(j), accumulate ? C - column(j) : 0);
        block_sums(sums, shared);
        keep_packed(d);
        keep_packed(in);
        const float mean_g = norm.kind == LAYER_NORM ? sums[0] / C : 0.0f, mean_gh = sums[1] / C;
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            float weight[8], out[8];
            if (w.data)
                load_any<ALIGNED>(weight, w, column(j), C - column(j));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float xh = (in[j][i] - s.x) * s.y, g = w.data ? d[j][i] * weight[i] : d[j][i];
                out[i] = s.y * (g - mean_g - xh * mean_gh);
                out[i] += before[j][i];
            }
            store_pack<ALIGNED>(dx + row + column(j), out, C - column(j));
        }
    }
    if (partial)
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++)
            store_pack<ALIGNED>(partial + (size_t)blockIdx.x * C + column(j), dw[j], C - column(j));
}

void norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats, Tensor w, Norm norm,
                   bool accumulate)
{
    const int N = dy.rows, C = dy.cols;
    CHECK_DENSE(dy, N, C);
    if (format_is_fp8(dx.format) || format_is_fp8(x.format) || amax) {
        norm_backward_fp8(dx, amax, dw, dy, x, stats, w, norm, accumulate);
        return;
    }
    CHECK_DENSE(x, N, C);
    CHECK_DENSE(dx, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    CHECK_DENSE_OPTIONAL(dw, 1, C);
    CHECK(!accumulate || dx.data != dy.data, "norm_backward: dx accumulates into dy");
    check_width(__func__, C);
    const bool aligned = is_aligned(dy, C) && is_aligned(x, C) && is_aligned(dx, C) && is_aligned(w, C);
    const int threads = block_threads((int)ceil_div(C, 8), MAX_PACKS, MAX_THREADS);
    int blocks = N;
    float *partial = NULL;
    if (N == 0)
        return;
    if (dw.data) {
        blocks = N < BLOCKS_PER_SM * device_sm_count() ? N : BLOCKS_PER_SM * device_sm_count();
        partial = (float *)device_scratch((size_t)blocks * C * sizeof(float), SCRATCH_0);
    }
    with_bool(aligned, [&](auto is_aligned) {
        with_type(x, [&](auto *in) {
            with_type(dy, [&](auto *d) {
                with_type(dx, [&](auto *out) {
                    norm_backward_kernel<decltype(is_aligned)::value><<<blocks, threads, 0, device_stream()>>>(
                        out, partial, d, in, (const float2 *)stats, any_in(w), N, C, norm, accumulate);
                });
            });
        });
    });
    LAUNCH_CHECK();
    if (dw.data)
        add_column_sums(dw, partial, blocks, C);
}
