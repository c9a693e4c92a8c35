/* Forward of norms that read or write FP8. norm_backward.cu reads x in any format.
 *
 * For an FP8 operand y there are two passes. A pass over rows stores x in FP8 groups, and computes
 * the statistics of the stored values and the maximum of y. A pass over tiles reads x and writes y
 * and its transpose. Bytes per element in COAT: 2 + 1.06 in the first pass, 1.06 + 2 in the second.
 * There is only one pass if y is not FP8 (a norm after a branch), or if the scale of y is reused
 * and y has no transpose. Then the first pass writes y. */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/tiles.cuh"

/* Returns mean (0 if not centered) and rstd of the row with elements v. Elements from column C on
 * are 0. */
__device__ static inline float2 row_stats(const float (&v)[MAX_PACKS][8], int C, Norm norm,
                                          float *shared)
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

/* x.data is NULL if the stream is x. amax is NULL if y is dense; then this kernel writes y. EXACT:
 * y is computed from x before rounding. CODES: y is FP8, and this kernel writes its rows to
 * `codes`. */
template <bool EXACT, bool CODES, class Reader>
__global__
__launch_bounds__(MAX_THREADS) void norm_rows_kernel(AnyOut y, TileOut codes, float *amax,
                                                     GroupOut x, float2 *stats, Reader stream,
                                                     AnyIn w, AnyIn residual, int C, Norm norm)
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

/* As norm_rows_kernel, for RMS_NORM with an FP8 operand y. Here max|y| = rstd max|x w|. So one
 * reduction is enough, and no values are kept during the reduction. */
template <bool EXACT, class Reader>
__global__ __launch_bounds__(MAX_THREADS, 2) void rms_rows_kernel(float *amax, GroupOut x,
                                                                  float2 *stats, Reader stream,
                                                                  AnyIn w, int C, float eps)
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
        if (column(j) - 8 * lane >= C) /* the same in all lanes of a warp */
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
            square += v[i] * v[i]; /* 0 from column C on */
    }
    square = warp_sum(square);
    m = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(m)));
    if (lane == 0)
        sums[warp] = square, maxima[warp] = m;
    __syncthreads();
    if (warp > 0)
        return;
    square = warp_sum(lane < warps ? sums[lane] : 0.0f);
    m = __uint_as_float(
        __reduce_max_sync(0xffffffffu, lane < warps ? __float_as_uint(maxima[lane]) : 0u));
    if (lane > 0)
        return;
    const float rstd = 1.0f / sqrtf(square / C + eps);
    stats[blockIdx.x] = make_float2(0, rstd);
    m *= rstd;
    if (m > *(volatile float *)amax)
        atomicMax((int *)amax, __float_as_int(m));
}

/* As rms_rows_kernel, if the scale of y is reused and this kernel writes the rows of y to `codes`.
 * The row stays as loaded during the reduction. D: DType or Known<a DType>, for codes and for x. */
template <class D, typename T, typename TW>
__global__ __launch_bounds__(MAX_THREADS) void rms_codes_kernel(TileOut codes, float *amax,
                                                                GroupOut x, D dtype, float2 *stats,
                                                                const T *stream, const TW *w, int C,
                                                                float eps)
{
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32,
              step = 8 * blockDim.x;
    const float inverse = 1.0f / tile_scale(codes, *tile_scale_from(codes));
    /* number of columns from the thread's first pack on */
    const int left = C - 8 * (int)threadIdx.x;
    const size_t at = (size_t)blockIdx.x * C + 8 * threadIdx.x;
    Pack<T> raw[MAX_PACKS];
    float square = 0, m = 0;
    x.dtype = dtype;
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++)
        raw[j] = load_pack<true>(stream + at + j * step, left - j * step);
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        float v[8];
        if (left + 8 * lane <= j * step) /* the same in all lanes of a warp */
            break;
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = raw[j][i], square += v[i] * v[i]; /* 0 from column C on */
        if (x.data)
            store_group(x, at + j * step, v, left > j * step);
    }
    square = warp_sum(square);
    if (lane == 0)
        sums[warp] = square;
    __syncthreads();
    keep_packed(raw);
    const float rstd = 1.0f / sqrtf(warp_sum(lane < warps ? sums[lane] : 0.0f) / C + eps);
    if (threadIdx.x == 0)
        stats[blockIdx.x] = make_float2(0, rstd);
#pragma unroll
    for (int j = 0; j < MAX_PACKS; j++) {
        if (left <= j * step)
            break;
        const Pack<TW> weight = load_pack<true>(w + C - left + j * step, 8);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = raw[j][i] * rstd * weight[i];
        m = fmaxf(m, pack_abs_max(v));
        *(uint2 *)(codes.data + at + j * step) = encode_pack(v, inverse, dtype);
    }
    raise_amax_by_warp(amax, *(volatile float *)amax, m);
}

/* Calls f(d). For E4M3, which all recipes use, the format is known at compile time. */
template <typename F>
static void with_format(DType d, F f)
{
    if (d == E4M3)
        f(Known<E4M3>());
    else
        f(d);
}

/* Computes y from x and its statistics. */
template <class Reader>
struct NormSource : SimpleSource {
    Reader x;
    const float2 *stats;
    AnyIn w;
    struct Raw {
        typename Reader::Raw x;
        float2 stats;
    };
    struct Fix {
        float weight[8];
    };
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

/* Calls f(source of y). */
template <typename F>
static void with_norm(Tensor x, const float *stats, Tensor w, F f)
{
    with_reader(x, [&](auto reader) {
        f(NormSource<decltype(reader)>{ {}, reader, (const float2 *)stats, any_in(w) });
    });
}

/* Writes only the transpose of y, from an x in groups of 16, when backward recomputes y. A thread
 * has 4 rows of one group. A block has WIDE_TILES tiles of 128 x 128, one below the other. NOTE:
 * with so few bytes the instruction rate is the limit. So each address, scale and statistic serves
 * 16 elements instead of 8. */
enum { WIDE_COLS = 128, WIDE_TILES = 2, WIDE_BLOCKS = 4 };

struct WideGroups {
    uint4 codes[4];
    uint8_t scale[4];
    float2 stats[4];
};

template <class D>
__device__ static inline WideGroups load_wide(const GroupReader<D, Known<4>> &x,
                                              const float2 *stats, int row, int col)
{
    const size_t first = (size_t)row * x.cols + col;
    const unsigned step = (unsigned)x.cols;
    WideGroups g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        g.codes[i] = *(const uint4 *)(x.data + first + i * step);
        g.scale[i] = x.scale[first / 16 + i * (step / 16)];
        g.stats[i] = stats[row + i];
    }
    return g;
}

template <class D>
__global__ __launch_bounds__(TILE_THREADS,
                             WIDE_BLOCKS) void norm_columns_kernel(TileOut y,
                                                                   GroupReader<D, Known<4>> x,
                                                                   const float2 *stats, AnyIn w)
{
    /* column c begins at 33 c + 4 (c / 16), which avoids bank conflicts */
    __shared__ uint32_t t[WIDE_COLS * 33 + 32];
    const int cg = threadIdx.x % 8, rg = threadIdx.x / 8, col0 = blockIdx.x * WIDE_COLS;
    const int col = min(col0 + 16 * cg, x.cols - 16),
              end = min((int)(blockIdx.y + 1) * WIDE_TILES * TILE_ROWS, y.rows);
    const float inverse = 1.0f / *y.scale;
    float weight[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            weight[h][i] = 1.0f;
        if (w.data)
            load_any<true>(weight[h], w, col + 8 * h, 8);
    }
    for (int row0 = blockIdx.y * WIDE_TILES * TILE_ROWS; row0 < end; row0 += TILE_ROWS) {
        const WideGroups g = load_wide(x, stats, min(row0 + 4 * rg, y.rows - 4), col);
        uint2 codes[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float v[8];
                decode_pack(v,
                            h ? make_uint2(g.codes[i].z, g.codes[i].w)
                              : make_uint2(g.codes[i].x, g.codes[i].y),
                            fp8_group_value(g.scale[i], x.dtype), x.dtype);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    v[k] = (v[k] - g.stats[i].x) * g.stats[i].y * weight[h][k];
                codes[h][i] = encode_pack(v, inverse, x.dtype);
            }
#pragma unroll
        for (int h = 0; h < 2; h++)
            transpose_words(t, 16 * cg + 8 * h, 4 * cg + rg, codes[h]);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < WIDE_COLS / 32; p++) {
            const int c = rg + 32 * p, q = 4 * cg, at = c * 33 + c / 16 * 4 + q;
            if (col0 + c < x.cols && row0 + 4 * q < y.rows)
                *(uint4 *)(y.data_t + (size_t)(col0 + c) * y.rows + row0 + 4 * q) =
                    make_uint4(t[at], t[at + 1], t[at + 2], t[at + 3]);
        }
        __syncthreads();
    }
}

static bool norm_columns(Tensor y, Tensor x, const float *stats, Tensor w)
{
    if (y.data || !y.data_t || y.format.dtype != x.format.dtype || x.format.group != 16)
        return false;
    const dim3 tiles = tile_grid(y.rows, y.cols);
    const dim3 grid((unsigned)ceil_div(y.cols, WIDE_COLS), (unsigned)ceil_div(tiles.y, WIDE_TILES));
    with_format(x.format.dtype, [&](auto dtype) {
        norm_columns_kernel<<<grid, TILE_THREADS, 0, device_stream()>>>(
            tile_out(y, NULL), group_reader(x, dtype), (const float2 *)stats, any_in(w));
    });
    LAUNCH_CHECK();
    return true;
}

/* Writes y in F32 or BF16. A thread has eight neighbouring columns of a row. */
template <class Source>
__global__ static void norm_dense_kernel(AnyOut y, Source source, int cols)
{
    const int row = (int)blockIdx.x, col = 8 * (int)(blockIdx.y * blockDim.x + threadIdx.x);
    float v[1][8];
    if (col >= cols)
        return;
    source.values(v, source.fetch(row, col), source.prepare(col), row, col);
    store_any(y, (size_t)row * cols + col, v[0], cols - col);
}

void norm_recompute_fp8(Tensor y, Tensor x, const float *stats, Tensor w)
{
    const int packs = ceil_div(x.cols, 8), threads = packs < 256 ? packs : 256;
    check_tensor("norm_recompute", "x", x, x.rows, x.cols);
    check_operand("norm_recompute", "y", y, x.rows, x.cols);
    check_dense_optional("norm_recompute", "w", w, 1, x.cols);
    if (!format_is_fp8(y.format)) {
        with_norm(x, stats, w, [&](auto source) {
            norm_dense_kernel<<<dim3((unsigned)x.rows, (unsigned)ceil_div(packs, threads)), threads,
                                0, device_stream()>>>(any_out(y), source, x.cols);
        });
        LAUNCH_CHECK();
        return;
    }
    if (norm_columns(y, x, stats, w))
        return;
    with_norm(x, stats, w, [&](auto source) {
        fp8_tiles<decltype(source)>({ { tile_out(y, NULL) } }, source, x.rows, x.cols);
    });
}

template <bool EXACT>
static void forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                    Norm norm)
{
    const int N = stream.rows, C = stream.cols, threads = norm_threads("norm_forward", C);
    const bool y_fp8 = format_is_fp8(y.format), x_new = x.data != stream.data;
    check_tensor("norm_forward", "stream", stream, N, C);
    check_operand("norm_forward", "y", y, N, C);
    check_dense_optional("norm_forward", "w", w, 1, C);
    check_dense_optional("norm_forward", "residual", residual, N, C);
    if (x_new)
        check_groups("norm_forward", "x", x, N, C);
    CHECK(!y_fp8 || !residual.data, "norm_forward: a residual is added to %s",
          format_name(y.format));
    const bool in_one = y_fp8 && scale_is_reused(y) && !y.data_t;
    const AmaxProbe probe =
        in_one ? amax_probe_new() : AmaxProbe{ y_fp8 ? amax_new() : NULL, NULL };
    const GroupOut saved = x_new ? group_out(x) : GroupOut{};
    if (EXACT && in_one && norm.kind == RMS_NORM && w.data && !format_has_scales(stream.format) &&
        (!x_new || x.format.dtype == y.format.dtype))
        with_type(stream, [&](auto *in) {
            with_type(w, [&](auto *weight) {
                with_format(y.format.dtype, [&](auto dtype) {
                    rms_codes_kernel<<<N, threads, 0, device_stream()>>>(
                        tile_out_in_range(y, probe), probe.amax, saved, dtype, (float2 *)stats, in,
                        weight, C, norm.eps);
                });
            });
        });
    else
        with_reader(stream, [&](auto reader) {
            if (in_one)
                norm_rows_kernel<EXACT, true><<<N, threads, 0, device_stream()>>>(
                    AnyOut{}, tile_out_in_range(y, probe), probe.amax, saved, (float2 *)stats,
                    reader, any_in(w), AnyIn{}, C, norm);
            else if (y_fp8 && norm.kind == RMS_NORM)
                rms_rows_kernel<EXACT><<<N, threads, 0, device_stream()>>>(
                    probe.amax, saved, (float2 *)stats, reader, any_in(w), C, norm.eps);
            else
                norm_rows_kernel<EXACT, false><<<N, threads, 0, device_stream()>>>(
                    any_out(y), TileOut{}, probe.amax, saved, (float2 *)stats, reader, any_in(w),
                    any_in(residual), C, norm);
        });
    LAUNCH_CHECK();
    if (y_fp8)
        with_norm(EXACT ? stream : x, stats, w, [&](auto source) {
            if (in_one)
                fp8_recode(y, probe, source, N, C);
            else
                fp8_operand_from(y, probe.amax, source, N, C);
        });
}

void norm_forward_fp8(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                      Norm norm, bool exact)
{
    (exact ? forward<true> : forward<false>)(y, x, stats, stream, w, residual, norm);
}
