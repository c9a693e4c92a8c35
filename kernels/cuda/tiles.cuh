/* Makes FP8 operands: codes and transposed codes with one scale, in two passes over a source of
 * values.
 *
 * Group scaling [COAT sec. 4.2]: pass 1 finds max|v|. This pass is fp8_amax below, or part of the
 * kernel that computes v. Pass 2 computes the scale, recomputes the values and writes the codes. A
 * Source computes eight neighbours of a row from its inputs. The passes are the same for all
 * Sources.
 *
 * If scale_is_reused, pass 2 runs first and measures the maximum. A second launch of few blocks
 * always follows. If the maximum exceeded the range, this launch encodes the values again; else it
 * returns at once. The host never waits for the device.
 *
 * Pass 2 works on tiles of 128 rows x 64 columns, with 4 x 8 elements per thread. Codes are written
 * in rows of 64 bytes, transposed codes in rows of 128 bytes through shared memory. Bytes per
 * element: those of the source, 1 for codes, 1 for transposed codes. */
#pragma once
#include "kernels/cuda/readers.cuh"

/* ---- maxima ---------------------------------------------------------------------------------- */

/* Returns a running maximum, which is 0 at first. The maximum is valid until five hundred more
 * maxima were taken. */
float *amax_new(void); /* tiles.cu */

/* *amax = max(*amax, m) over the grid. The bits of m >= 0 have the order of integers, so the result
 * does not depend on the order of threads. All threads of the block must call this function.
 * `shared` is as for block_max. */
__device__ inline void raise_amax(float *amax, float m, float *shared)
{
    m = block_max(m, shared);
    if (threadIdx.x == 0 && m > *(volatile float *)amax)
        atomicMax((int *)amax, __float_as_int(m));
}

/* As raise_amax, for one warp, without a barrier. All of its threads must call this function. seen:
 * *amax as a volatile float, or an earlier value of *amax. m must not be NaN. */
template <typename T>
__device__ inline void raise_amax_by_warp(float *amax, T &seen, float m)
{
    m = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(m)));
    if (threadIdx.x % 32 == 0 && m > seen)
        atomicMax((int *)amax, __float_as_int(m));
}

/* ---- outputs --------------------------------------------------------------------------------- */

/* A tensor in FP8 groups of 16 elements. If data is NULL, nothing is stored. */
struct GroupOut {
    uint8_t *data, *scale;
    DType dtype;
};

static inline GroupOut group_out(Tensor t)
{
    return { (uint8_t *)t.data, (uint8_t *)t.scale, t.format.dtype };
}

/* Rounds eight values of a group, which this thread shares with its neighbour. Returns the scale,
 * replaces v by the values of the codes, and stores the codes in `codes`. All threads of a warp
 * must call this function. */
__device__ inline uint8_t round_group(float (&v)[8], uint2 &codes, DType d)
{
    float m = pack_abs_max(v);
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    const uint8_t scale = fp8_group_scale(m, d);
    const float s = fp8_group_value(scale, d);
    codes = encode_pack(v, inverse_of_few_bits(s), d);
    decode_pack(v, codes, s, d);
    return scale;
}

/* Calls round_group, and stores the codes and the scale if the group is inside the row. */
__device__ inline void store_group(GroupOut out, size_t at, float (&v)[8], bool inside)
{
    uint2 codes;
    const uint8_t scale = round_group(v, codes, out.dtype);
    if (!inside)
        return;
    *(uint2 *)(out.data + at) = codes;
    if (at % 16 == 0)
        out.scale[at / 16] = scale;
}

/* An FP8 tensor with one scale. *scale is set from headroom times *amax; if amax is NULL, *scale is
 * kept. */
struct TileOut {
    uint8_t *data, *data_t; /* either may be NULL */
    float *scale;
    const float *amax;
    DType dtype;
    int rows, cols;
    float *noted; /* *noted is set to *amax; NULL: *amax is not copied */
    float headroom;
};

static inline TileOut tile_out(Tensor t, const float *amax, float *noted, float headroom)
{
    return { (uint8_t *)t.data,
             (uint8_t *)t.data_t,
             (float *)t.scale,
             amax,
             t.format.dtype,
             t.rows,
             t.cols,
             noted,
             headroom };
}

/* Returns t with the scale from *amax or, if amax is NULL, with the scale that t has. */
static inline TileOut tile_out(Tensor t, const float *amax)
{
    return tile_out(t, amax, t.scale_amax, 1);
}

/* tile_scale returns the scale. Its argument `from` is *tile_scale_from. */
__device__ inline const float *tile_scale_from(const TileOut &out)
{
    return out.amax ? out.amax : out.scale;
}

__device__ inline float tile_scale(const TileOut &out, float from)
{
    if (!out.amax)
        return from;
    const float s = out.headroom * fp8_scale(from, out.dtype);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *out.scale = s;
        if (out.noted)
            *out.noted = from;
    }
    return s;
}

/* What a pass over a y with reused scale tells the launch after the pass. NOTE: that launch cannot
 * read the range from y, because its first block changes the range before other blocks have
 * begun. */
struct AmaxProbe {
    float *amax, *scale_amax;
}; /* max|y|; the maximum that gave the scale before the pass */

static inline AmaxProbe amax_probe_new(void)
{
    return { amax_new(), amax_new() };
}

/* y as the pass encodes it, and y as the later launch encodes it again. */
static inline TileOut tile_out_in_range(Tensor y, AmaxProbe probe)
{
    return tile_out(y, y.scale_amax, probe.scale_amax, fp8_headroom(y.format.dtype));
}

static inline TileOut tile_out_recode(Tensor y, AmaxProbe probe)
{
    return tile_out(y, probe.amax, y.scale_amax, fp8_headroom(y.format.dtype));
}

/* Returns true if y was within its range and need not be encoded again. */
__device__ inline bool was_in_range(const TileOut &recode, AmaxProbe probe)
{
    return !(*probe.amax / recode.headroom > *probe.scale_amax);
}

/* Dies unless t has this shape and is dense or an FP8 GEMM operand. An FP8 operand has one scale,
 * and its rows and columns are multiples of 16. */
static inline void check_operand(const char *op, const char *name, Tensor t, int rows, int cols)
{
    if (t.rows != rows || t.cols != cols)
        die("%s: %s is (%d, %d); expected (%d, %d)", op, name, t.rows, t.cols, rows, cols);
    if (format_has_scales(t.format) && (t.format.group || !t.scale || rows % 16 || cols % 16))
        die("%s: %s is %s of (%d, %d); FP8 operands have one scale, and rows and columns in "
            "multiples of 16",
            op, name, format_name(t.format), rows, cols);
}

/* Dies unless t has this shape and is FP8 in groups of 16. */
static inline void check_groups(const char *op, const char *name, Tensor t, int rows, int cols)
{
    if (t.rows != rows || t.cols != cols || !format_is_fp8(t.format) || t.format.group != 16 ||
        !t.scale)
        die("%s: %s is %s of (%d, %d); the CUDA back end saves f32, bf16 or FP8 in groups of 16, "
            "here of (%d, %d)",
            op, name, format_name(t.format), t.rows, t.cols, rows, cols);
}

/* ---- the passes ------------------------------------------------------------------------------ */

enum { TILE_ROWS = 128, TILE_COLS = 64, TILE_THREADS = 256, AMAX_PACKS = 4 };

/* A Source has rows of packs. From each of these packs it computes one pack for each of OUTPUTS
 * outputs. Pass 1 measures the first MEASURED outputs:
 *     Raw  fetch(row, col)                                        loads the inputs of one pack
 *     Fix  prepare(col)                                           values shared by all rows of a column
 *     void values(float (&)[OUTPUTS][8], Raw, Fix, row, col)
 *     int  column(output, col)                                    the pack's column in that output
 *     int  end(rows)                                              the row, a multiple of TILE_ROWS or `rows`, at which passes end */

/* A Source with one output in the same columns. Its rows share no values. */
struct SimpleSource {
    enum { OUTPUTS = 1, MEASURED = 1 };
    struct Fix {
    };
    __device__ Fix prepare(int) const
    {
        return {};
    }
    __device__ int column(int, int col) const
    {
        return col;
    }
    __device__ int end(int rows) const
    {
        return rows;
    }
};

/* A Source that reads its values from a tensor. */
template <class Reader>
struct ReaderSource : SimpleSource {
    Reader x;
    typedef typename Reader::Raw Raw;
    __device__ Raw fetch(int row, int col) const
    {
        return load_inside(x, row, col);
    }
    __device__ void values(float (&y)[1][8], const Raw &raw, Fix, int, int) const
    {
        x.values(y[0], raw);
    }
};

/* Pass 1: finds the maximum over all rows x cols elements of the measured outputs; cols is a multiple
 * of 8. The grid's threads take the packs of all rows in turn, so that narrow rows, too, keep all
 * threads busy. After the last row a thread takes packs of the last row again, which does not change
 * the maximum: a condition around the loads would become branches (encode_tile). */
template <class Source>
__global__ __launch_bounds__(TILE_THREADS,
                             Source::OUTPUTS > 2 ? 2 : 3) void fp8_amax_kernel(float *amax,
                                                                               Source source,
                                                                               int rows, int cols)
{
    __shared__ float shared[32];
    const int across = cols / 8, first = blockIdx.x * TILE_THREADS + threadIdx.x,
              step = gridDim.x * TILE_THREADS;
    int row = first / across, pack = first % across;
    float m = 0;
    rows = source.end(rows);
    while (row < rows) {
        typename Source::Raw raw[AMAX_PACKS];
        int at[AMAX_PACKS], col[AMAX_PACKS];
#pragma unroll
        for (int k = 0; k < AMAX_PACKS; k++) {
            at[k] = min(row, rows - 1), col[k] = 8 * pack;
            raw[k] = source.fetch(at[k], col[k]);
            row += step / across, pack += step % across;
            if (pack >= across)
                pack -= across, row++;
        }
#pragma unroll
        for (int k = 0; k < AMAX_PACKS; k++) {
            float v[Source::OUTPUTS][8];
            source.values(v, raw[k], source.prepare(col[k]), at[k], col[k]);
#pragma unroll
            for (int o = 0; o < Source::MEASURED; o++)
                m = fmaxf(m, pack_abs_max(v[o]));
        }
    }
    raise_amax(amax, m, shared);
}

template <class Source>
struct TileOuts {
    TileOut out[Source::OUTPUTS];
};

/* Stores eight columns of four rows of codes in t, from column `column` of t on, one word per
 * column. A column of t has 33 words. */
__device__ inline void transpose_words(uint32_t *t, int column, int word, const uint2 (&codes)[4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t a = half ? codes[0].y : codes[0].x, b = half ? codes[1].y : codes[1].x;
        const uint32_t c = half ? codes[2].y : codes[2].x, d = half ? codes[3].y : codes[3].x;
        const uint32_t ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
        const uint32_t cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
        uint32_t *at = t + (column + 4 * half) * 33 + word;
        at[0] = __byte_perm(ab0, cd0, 0x5410);
        at[33] = __byte_perm(ab0, cd0, 0x7632);
        at[66] = __byte_perm(ab1, cd1, 0x5410);
        at[99] = __byte_perm(ab1, cd1, 0x7632);
    }
}

/* Stores codes as rows and, through t, as columns. codes[i]: eight codes of the thread's row i.
 * width: number of columns of the source. */
template <class Source>
__device__ inline void store_tile(const TileOut &out, int o, const Source &source,
                                  const uint2 (&codes)[4], int row0, int col0, int width,
                                  uint32_t *t)
{
    const int cg = threadIdx.x % 8, rg = threadIdx.x / 8, row = row0 + 4 * rg;
    if (out.data && col0 + 8 * cg < width && row < out.rows)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint2 *)(out.data + (size_t)(row + i) * out.cols + source.column(o, col0 + 8 * cg)) =
                codes[i];
    if (!out.data_t)
        return;
    transpose_words(t, 8 * cg, rg, codes);
    __syncthreads();
#pragma unroll
    for (int p = 0; p < TILE_COLS / 32; p++) {
        const int c = rg + 32 * p, q = 4 * cg;
        if (col0 + c < width && row0 + 4 * q < out.rows)
            *(uint4 *)(out.data_t + (size_t)source.column(o, col0 + c) * out.rows + row0 + 4 * q) =
                make_uint4(t[c * 33 + q], t[c * 33 + q + 1], t[c * 33 + q + 2], t[c * 33 + q + 3]);
    }
    __syncthreads();
}

/* Writes the tile from (row0, col0) on. rows, cols: the size of the source, multiples of 16.
 * Returns the thread's maximum of the measured outputs. NOTE: a thread outside the source reads the
 * last pack of the last rows, and stores nothing. A condition around the loads would become
 * branches, and the loads of the second pair of rows, the weights and the scale would wait for
 * earlier loads. */
template <class Source>
__device__ inline float encode_tile(const TileOuts<Source> &outs, const Source &source, int row0,
                                    int col0, int rows, int cols, uint32_t *t)
{
    const int row = min(row0 + (int)threadIdx.x / 8 * 4, rows - 4),
              col = min(col0 + (int)threadIdx.x % 8 * 8, cols - 8);
    typename Source::Raw raw[4];
    float from[Source::OUTPUTS], inverse[Source::OUTPUTS], m = 0;
    uint2 codes[Source::OUTPUTS][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        raw[i] = source.fetch(row + i, col);
#pragma unroll
    for (int o = 0; o < Source::OUTPUTS; o++)
        from[o] = *tile_scale_from(outs.out[o]);
    const typename Source::Fix fix = source.prepare(col);
#pragma unroll
    for (int o = 0; o < Source::OUTPUTS; o++)
        inverse[o] = 1.0f / tile_scale(outs.out[o], from[o]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[Source::OUTPUTS][8];
        source.values(v, raw[i], fix, row + i, col);
#pragma unroll
        for (int o = 0; o < Source::MEASURED; o++)
            m = fmaxf(m, pack_abs_max(v[o]));
#pragma unroll
        for (int o = 0; o < Source::OUTPUTS; o++)
            codes[o][i] = encode_pack(v[o], inverse[o], outs.out[o].dtype);
    }
#pragma unroll
    for (int o = 0; o < Source::OUTPUTS; o++)
        store_tile(outs.out[o], o, source, codes[o], row0, col0, cols, t);
    return m;
}

/* Pass 2: encodes one tile per block. */
template <class Source>
__global__ __launch_bounds__(TILE_THREADS, Source::OUTPUTS > 2 ? 2 : 3) void fp8_tile_kernel(
    TileOuts<Source> outs, Source source, int rows, int cols)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    if ((int)blockIdx.y * TILE_ROWS >= source.end(rows))
        return;
    encode_tile(outs, source, blockIdx.y * TILE_ROWS, blockIdx.x * TILE_COLS, rows, cols, t);
}

/* Both passes in one, for a reused scale. */
template <class Source>
__global__ __launch_bounds__(TILE_THREADS, Source::OUTPUTS > 2 ? 2 : 3) void fp8_in_range_kernel(
    float *amax, TileOuts<Source> outs, Source source, int rows, int cols)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    __shared__ float shared[32];
    if ((int)blockIdx.y * TILE_ROWS >= source.end(rows))
        return;
    const float m =
        encode_tile(outs, source, blockIdx.y * TILE_ROWS, blockIdx.x * TILE_COLS, rows, cols, t);
    raise_amax(amax, m, shared);
}

/* Runs after the pass: encodes y again if y exceeded its range. */
template <class Source>
__global__ __launch_bounds__(TILE_THREADS, Source::OUTPUTS > 2 ? 2 : 3) void fp8_recode_kernel(
    AmaxProbe probe, TileOuts<Source> outs, Source source, int rows, int cols)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    if (was_in_range(outs.out[0], probe))
        return;
    const int across = (cols + TILE_COLS - 1) / TILE_COLS,
              tiles = (source.end(rows) + TILE_ROWS - 1) / TILE_ROWS * across;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x)
        encode_tile(outs, source, i / across * TILE_ROWS, i % across * TILE_COLS, rows, cols, t);
}

template <class Source>
static inline void fp8_amax(float *amax, const Source &source, int rows, int cols)
{
    const size_t needed = ceil_div((size_t)rows * cols, 8 * AMAX_PACKS * TILE_THREADS),
                 most = 8 * (size_t)device_sm_count();
    const auto blocks = (unsigned)(needed < most ? needed : most);
    fp8_amax_kernel<<<blocks, TILE_THREADS, 0, device_stream()>>>(amax, source, rows, cols);
    LAUNCH_CHECK();
}

static inline dim3 tile_grid(int rows, int cols)
{
    enum { MOST = 65535 * TILE_ROWS }; /* the limit of gridDim.y */
    if (rows > MOST)
        die("an FP8 operand of %d rows; the CUDA back end supports up to %d: use smaller "
            "micro-batches",
            rows, (int)MOST);
    return dim3((unsigned)ceil_div(cols, TILE_COLS), (unsigned)ceil_div(rows, TILE_ROWS));
}

template <class Source>
static inline void fp8_tiles(const TileOuts<Source> &outs, const Source &source, int rows, int cols)
{
    fp8_tile_kernel<<<tile_grid(rows, cols), TILE_THREADS, 0, device_stream()>>>(outs, source, rows,
                                                                                 cols);
    LAUNCH_CHECK();
}

/* Follows a kernel that has encoded y by tile_out_in_range and raised probe.amax. Encodes y again
 * if y exceeded its range. Writes only the measured outputs. */
template <class Source>
static inline void fp8_recode(Tensor y, AmaxProbe probe, const Source &source, int rows, int cols)
{
    const unsigned tiles = tile_grid(rows, cols).x * tile_grid(rows, cols).y,
                   most = 2 * (unsigned)device_sm_count();
    TileOuts<Source> outs;
    for (int o = 0; o < Source::OUTPUTS; o++) {
        outs.out[o] = tile_out_recode(y, probe);
        if (o >= Source::MEASURED)
            outs.out[o].data = outs.out[o].data_t = NULL;
    }
    const auto blocks = tiles < most ? tiles : most;
    fp8_recode_kernel<<<blocks, TILE_THREADS, 0, device_stream()>>>(probe, outs, source, rows,
                                                                    cols);
    LAUNCH_CHECK();
}

/* Encodes y, which consists of all measured outputs of a source, with its reused scale. outs: the
 * other outputs. */
template <class Source>
static inline void fp8_in_range(Tensor y, TileOuts<Source> outs, const Source &source, int rows,
                                int cols)
{
    const AmaxProbe probe = amax_probe_new();
    for (int o = 0; o < Source::MEASURED; o++)
        outs.out[o] = tile_out_in_range(y, probe);
    fp8_in_range_kernel<<<tile_grid(rows, cols), TILE_THREADS, 0, device_stream()>>>(
        probe.amax, outs, source, rows, cols);
    LAUNCH_CHECK();
    fp8_recode(y, probe, source, rows, cols);
}

/* Encodes y if max|y| is known. *amax is used unless y's scale is reused. */
template <class Source>
static inline void fp8_operand_from(Tensor y, const float *amax, const Source &source, int rows,
                                    int cols)
{
    TileOuts<Source> outs = {};
    for (int o = 0; o < Source::MEASURED; o++)
        outs.out[o] = tile_out(y, amax);
    if (scale_is_reused(y))
        fp8_in_range(y, outs, source, rows, cols);
    else
        fp8_tiles(outs, source, rows, cols);
}

/* Encodes y if max|y| is not known. */
template <class Source>
static inline void fp8_operand(Tensor y, TileOuts<Source> outs, const Source &source, int rows,
                               int cols)
{
    if (scale_is_reused(y)) {
        fp8_in_range(y, outs, source, rows, cols);
        return;
    }
    float *amax = amax_new();
    fp8_amax(amax, source, rows, cols);
    for (int o = 0; o < Source::MEASURED; o++)
        outs.out[o] = tile_out(y, amax);
    fp8_tiles(outs, source, rows, cols);
}
