/* RMSNorm and LayerNorm, forward. norm_backward.cu has the backward pass; norm_fp8.cu has both
 * passes with FP8 inputs or outputs.
 *
 * Bytes per element in BF16: 4 (stream, y), 2 more if x is another tensor, 2 more with a residual.
 * Weights are read from L1. Statistics are 8 bytes per row. Rounding: sums are F32 trees; the
 * specification sums in F64. */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/operations_fp8.h"

/* ---- forward --------------------------------------------------------------------------------- */

/* NOTE: latency limits the speed of a row, so several rows must be in flight on an SM. The BF16
 * variants are limited to 64 registers, which allows 8 rows of 4096. If one kernel contained both
 * kinds of norm, or lacked keep_packed, registers would spill. */
template <bool CENTER, typename TS, typename TR>
__global__ __launch_bounds__(MAX_THREADS,
                             sizeof(TS) + sizeof(TR) == 4
                                 ? 2
                                 : 1) void norm_forward_kernel(AnyOut y, AnyOut x, float2 *stats,
                                                               const TS *stream, AnyIn w,
                                                               const TR *residual, int C, float eps)
{
    __shared__ float shared[32];
    const size_t row = (size_t)blockIdx.x * C;
    Pack<TS> in[MAX_PACKS];
    Pack<TR> add[MAX_PACKS];
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        in[j] = load_pack(stream + row + column(j), C - column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        add[j] = load_pack(residual + row + column(j), residual ? C - column(j) : 0);

    float mean = 0, square = 0;
    if (CENTER) { /* columns from C on are 0 */
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
            square += column(j) < C ? d * d : 0.0f;
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
            store_any(x, row + column(j), v, C - column(j));
        if (w.data)
            load_any(weight, w, column(j), C - column(j));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = (v[i] - mean) * rstd * (w.data ? weight[i] : 1.0f);
            v[i] += add[j][i];
        }
        store_any(y, row + column(j), v, C - column(j));
    }
}

void backend_norm_forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w,
                          Tensor residual, Norm norm, ForwardSource from)
{
    const int N = stream.rows, C = stream.cols;
    const bool exact = from == FROM_EXACT && format_is_fp8(x.format) && x.data != stream.data;
    if (from == FROM_EXACT && !exact) {
        backend_quantize(x, stream);
        x = stream;
    }
    if (format_is_fp8(y.format) || format_is_fp8(x.format)) {
        norm_forward_fp8(y, x, stats, stream, w, residual, norm, exact);
        return;
    }
    CHECK_DENSE(stream, N, C);
    CHECK_DENSE(x, N, C);
    CHECK_DENSE(y, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    CHECK_DENSE_OPTIONAL(residual, N, C);
    const int threads = norm_threads(OPERATION, C);
    AnyOut stored = any_out(x);
    if (x.data == stream.data) {
        CHECK(format_equal(x.format, stream.format),
              "norm_forward: x and stream share memory but have different formats");
        stored.data = NULL;
    }
    if (!residual.data)
        residual.format = stream.format; /* selects the variant with the fewest registers */
    check_aligned(OPERATION, C, y, x, stream, w, residual);
    if (N == 0)
        return;
    with_bool(norm.kind == LAYER_NORM, [&](auto center) {
        with_type(stream, [&](auto *in) {
            with_type(residual, [&](auto *add) {
                norm_forward_kernel<decltype(center)::value><<<N, threads, 0, device_stream()>>>(
                    any_out(y), stored, (float2 *)stats, in, any_in(w), add, C, norm.eps);
            });
        });
    });
    LAUNCH_CHECK();
}

/* ---- recomputation of y
 * ----------------------------------------------------------------------- */

template <typename TX>
__global__ __launch_bounds__(MAX_THREADS) void norm_recompute_kernel(AnyOut y, const TX *x,
                                                                     const float2 *stats, AnyIn w,
                                                                     int C)
{
    const size_t row = (size_t)blockIdx.x * C;
    const float2 s = stats[blockIdx.x];
    Pack<TX> in[MAX_PACKS];
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        in[j] = load_pack(x + row + column(j), C - column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float v[8], weight[8];
        if (w.data)
            load_any(weight, w, column(j), C - column(j));
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = (in[j][i] - s.x) * s.y * (w.data ? weight[i] : 1.0f);
        store_any(y, row + column(j), v, C - column(j));
    }
}

void backend_norm_recompute(Tensor y, Tensor x, const float *stats, Tensor w)
{
    const int N = x.rows, C = x.cols;
    if (format_is_fp8(y.format) || format_is_fp8(x.format)) {
        norm_recompute_fp8(y, x, stats, w);
        return;
    }
    CHECK_DENSE(x, N, C);
    CHECK_DENSE(y, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    check_aligned(OPERATION, C, y, x, w);
    const int threads = norm_threads(OPERATION, C);
    if (N == 0)
        return;
    with_type(x, [&](auto *in) {
        norm_recompute_kernel<<<N, threads, 0, device_stream()>>>(
            any_out(y), in, (const float2 *)stats, any_in(w), C);
    });
    LAUNCH_CHECK();
}
