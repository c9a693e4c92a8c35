/* Norms that read or write FP8, forward; norm_backward.cu reads any x.
 *
 * y an FP8 operand: a pass over rows stores x in FP8 groups, takes the statistics of what was stored and the
 * maximum of y; a pass over tiles reads x and writes y and its transpose. Bytes per element in COAT: 2 + 1.06 and
 * 1.06 + 2. Where y is not FP8 (a norm behind a branch), or its range is KEPT and it has no transpose, the first pass
 * writes it and there is no second. */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/tiles.cuh"

/* Mean (0 if not centered) and rstd of the row whose elements are v; what lies behind column C is 0. */
__device__ static inline float2 row_stats(const float (&v)[MAX_PACKS][8], int C, Norm norm, float *shared)
{
    float mean = 0, square = 0;
    if (norm.kind == LAYER_NORM) {
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                mean += v[j][i];
        mean = block_sum(mean, shared) / C;
    }
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column(j) < C)
                square += (v[j][i] - mean) * (v[j][i] - mean);
    return make_float2(mean, 1.0f / sqrtf(block_sum(square, shared) / C + norm.eps));
}

/* x.data is NULL if the stream is x; amax is NULL if y is dense and written here. EXACT: y does not see x's rounding. CODES: y is
 * FP8, `codes`, and its row is written here. */
template <bool EXACT, bool CODES, class Reader> __global__ __launch_bounds__(MAX_THREADS)
void norm_rows_kernel(AnyOut y, TileOut codes, float *amax, GroupOut x, float2 *stats, Reader stream, AnyIn w, AnyIn residual,
                      int C, Norm norm)
{
    __shared__ float shared[32];
    const float inverse = CODES ? 1.0f / tile_scale(codes, *tile_scale_from(codes)) : 0.0f;
    const size_t row = (size_t)blockIdx.x * C;
    typename Reader::Raw raw[MAX_PACKS];
    float v[MAX_PACKS][8], m = 0;
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        raw[j] = load_or_zero(stream, blockIdx.x, column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        stream.values(v[j], raw[j]);
        if (x.data && EXACT) {
            float rounded[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                rounded[i] = v[j][i];
            store_group(x, row + column(j), rounded, column(j) < C);
        } else if (x.data)
            store_group(x, row + column(j), v[j], column(j) < C);
    }
    const float2 s = row_stats(v, C, norm, shared);
    if (threadIdx.x == 0)
        stats[blockIdx.x] = s;
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float weight[8], add[8];
        if (column(j) >= C)
            continue;
        if (w.data)
            load_any<true>(weight, w, column(j), 8);
        if (residual.data)
            load_any<true>(add, residual, row + column(j), 8);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[j][i] = (v[j][i] - s.x) * s.y * (w.data ? weight[i] : 1.0f);
            if (residual.data)
                v[j][i] += add[i];
        }
        m = fmaxf(m, pack_abs_max(v[j]));
        if (CODES)
            *(uint2 *)(codes.data + row + column(j)) = encode_pack(v[j], inverse, codes.dtype);
        else if (!amax)
            store_any<true>(y, row + column(j), v[j], 8);
    }
    if (amax)
        raise_amax(amax, m, shared);
}

/* The same of an RMS_NORM whose y is an FP8 operand: max|y| = rstd max|x w|, so that nothing is held over the sum of
 * squares and one reduction is enough. */
template <bool EXACT, class Reader> __global__ __launch_bounds__(MAX_THREADS, 2)
void rms_rows_kernel(float *amax, GroupOut x, float2 *stats, Reader stream, AnyIn w, int C, float eps)
{
    __shared__ float sums[32], maxima[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const size_t row = (size_t)blockIdx.x * C;
    typename Reader::Raw raw[MAX_PACKS];
    float square = 0, m = 0;
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        raw[j] = load_or_zero(stream, blockIdx.x, column(j));
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float v[8], stored[8], weight[8];
        if (column(j) - 8 * lane >= C)                  /* all of the warp */
            break;
        stream.values(v, raw[j]);
        if (x.data) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                stored[i] = v[i];
            store_group(x, row + column(j), stored, column(j) < C);
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = EXACT ? v[i] : stored[i];
        }
        if (w.data) {
            load_any<true>(weight, w, column(j), C - column(j));
#pragma unroll
            for (int i = 0; i < 8; i++)
                m = fmaxf(m, fabsf(v[i] * weight[i]));
        } else
            m = fmaxf(m, pack_abs_max(v));
#pragma unroll
        for (int i = 0; i < 8; i++)
            square += v[i] * v[i];                      /* 0 behind column C */
    }
    square = warp_sum(square);
    m = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(m)));
    if (lane == 0)
        sums[warp] = square, maxima[warp] = m;
    __syncthreads();
    if (warp > 0)
        return;
    square = warp_sum(lane < warps ? sums[lane] : 0.0f);
    m = __uint_as_float(__reduce_max_sync(0xffffffffu, lane < warps ? __float_as_uint(maxima[lane]) : 0u));
    if (lane > 0)
        return;
    const float rstd = 1.0f / sqrtf(square / C + eps);
    stats[blockIdx.x] = make_float2(0, rstd);
    m *= rstd;
    if (m > *(volatile float *)amax)
        atomicMax((int *)amax, __float_as_int(m));
}

/* y from x and its statistics. */
template <class Reader> struct NormSource : SimpleSource {
    Reader x;
    const float2 *stats;
    AnyIn w;
    struct Raw { typename Reader::Raw x; float2 stats; };
    struct Fix { float weight[8]; };
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(x, row, col), stats[row] };
    }
    __device__ Fix prepare(int col) const
    {
        Fix fix;
#pragma unroll
        for (int i = 0; i < 8; i++)
            fix.weight[i] = 1.0f;
        if (w.data)
            load_any<true>(fix.weight, w, col, 8);
        return fix;
    }
    __device__ void values(float (&y)[1][8], const Raw &raw, const Fix &fix, int, int) const
    {
        x.values(y[0], raw.x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            y[0][i] = (y[0][i] - raw.stats.x) * raw.stats.y * fix.weight[i];
    }
};

/* f(source of y). */
template <typename F> static void with_norm(Tensor x, const float *stats, Tensor w, F f)
{
    with_reader(x, [&](auto reader) { f(NormSource<decltype(reader)>{ {}, reader, (const float2 *)stats, any_in(w) }); });
}

void norm_again_fp8(Tensor y, Tensor x, const float *stats, Tensor w)
{
    check_tensor("norm_again", "x", x, x.rows, x.cols);
    check_operand("norm_again", "y", y, x.rows, x.cols);
    check_dense_optional("norm_again", "w", w, 1, x.cols);
    if (!format_is_fp8(y.format))
        die("norm_again: y is %s, x %s; the CUDA back end has no such pair", format_name(y.format), format_name(x.format));
    with_norm(x, stats, w, [&](auto source) {
        fp8_tiles<decltype(source)>({ { tile_out(y, NULL) } }, source, x.rows, x.cols);
    });
}

template <bool EXACT>
static void forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm)
{
    const int N = stream.rows, C = stream.cols, threads = norm_threads("norm_forward", C);
    const bool y_fp8 = format_is_fp8(y.format), x_new = x.data != stream.data;
    check_tensor("norm_forward", "stream", stream, N, C);
    check_operand("norm_forward", "y", y, N, C);
    check_dense_optional("norm_forward", "w", w, 1, C);
    check_dense_optional("norm_forward", "residual", residual, N, C);
    if (x_new)
        check_groups("norm_forward", "x", x, N, C);
    CHECK(!y_fp8 || !residual.data, "norm_forward: a residual is added to %s", format_name(y.format));
    const bool in_one = y_fp8 && range_is_kept(y) && !y.data_t;
    const Found found = in_one ? found_new() : Found{ y_fp8 ? amax_new() : NULL, NULL };
    const GroupOut saved = x_new ? group_out(x) : GroupOut{};
    with_reader(stream, [&](auto reader) {
        if (in_one)
            norm_rows_kernel<EXACT, true><<<N, threads, 0, device_stream()>>>(
                AnyOut{}, tile_out_in_range(y, found), found.amax, saved, (float2 *)stats, reader, any_in(w), AnyIn{}, C, norm);
        else if (y_fp8 && norm.kind == RMS_NORM)
            rms_rows_kernel<EXACT><<<N, threads, 0, device_stream()>>>(found.amax, saved, (float2 *)stats, reader, any_in(w), C,
                                                                      norm.eps);
        else
            norm_rows_kernel<EXACT, false><<<N, threads, 0, device_stream()>>>(
                any_out(y), TileOut{}, found.amax, saved, (float2 *)stats, reader, any_in(w), any_in(residual), C, norm);
    });
    LAUNCH_CHECK();
    if (y_fp8)
        with_norm(EXACT ? stream : x, stats, w, [&](auto source) {
            if (in_one)
                fp8_again(y, found, source, N, C);
            else
                fp8_operand_from(y, found.amax, source, N, C);
        });
}

void norm_forward_fp8(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm)
{
    forward<false>(y, x, stats, stream, w, residual, norm);
}

void norm_forward_exact(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm)
{
    if (format_is_fp8(x.format) && x.data != stream.data)
        forward<true>(y, x, stats, stream, w, residual, norm);
    else {
        quantize(x, stream);
        norm_forward(y, stream, stats, stream, w, residual, norm);
    }
}
