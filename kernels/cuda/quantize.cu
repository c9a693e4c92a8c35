/* Conversions between formats. A thread moves PACKS packs of eight elements.
 *
 * Bytes per element are those of x and y. BF16 to BF16 takes 4 bytes. BF16 to E4M3/16 takes 3.06
 * (codes, and a byte per 16 codes). BF16 to FP8 with one scale takes 5, because x is read twice,
 * for the maximum and for the codes. The transposed copy adds only its own byte: a block transposes
 * a tile of 128 x 64 codes in shared memory and writes both copies. Maxima do not depend on the
 * order, and the division is correctly rounded (fp8.cuh). So scales and codes equal those of the
 * specification.
 *
 * The fast kernels convert whole packs of aligned tensors, in groups of 8, 16, ... 256. The *_any
 * kernels convert other tensors, and rows that remain, element by element. */
#include "kernels/cuda/tiles.cuh"

enum { THREADS = 256, PACKS = 4, AMAX_BLOCKS = 1024 };

/* ---- loads ----------------------------------------------------------------------------------- */

/* Returns the index of the first element of the thread's first pack. */
__device__ static inline size_t first_element()
{
    return 8 * ((size_t)blockIdx.x * PACKS * THREADS + threadIdx.x);
}

/* Loads the thread's packs, which are 8 THREADS elements apart, from `first` on. From n (a multiple
 * of 8) on, loads the last pack again. NOTE: with a condition around the loads, each load would
 * wait for the previous one. */
template <class Reader>
__device__ static inline void load_packs(float (&v)[PACKS][8], const Reader &x, size_t first,
                                         size_t n)
{
    typename Reader::Raw raw[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        raw[j] = x.at(min(first + 8 * j * THREADS, n - 8));
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        x.values(v[j], raw[j]);
}

/* Returns the reader of one item, of n elements, of a tensor that has a scale per item
 * (tensor_item). A tensor with groups is read as one item. */
template <class Reader>
__device__ static inline Reader item_reader(Reader x, unsigned item, size_t n)
{
    x.data += item * n;
    return x;
}

template <class D>
__device__ static inline TensorReader<D> item_reader(TensorReader<D> x, unsigned item, size_t n)
{
    x.data += item * n;
    x.scale += SCALE_FLOATS * item;
    return x;
}

/* A tensor in any format, read element by element. */
struct AnyTensor {
    void *data, *data_t, *scale;
    Format format;
    int rows, cols;
};

__device__ static inline float element(const AnyTensor &t, size_t i)
{
    if (t.format.dtype == F32)
        return ((const float *)t.data)[i];
    if (t.format.dtype == BF16)
        return to_float(((const bf16 *)t.data)[i]);
    const int group = t.format.group;
    const float s = group ? fp8_group_value(((const uint8_t *)t.scale)[i / group], t.format.dtype)
                          : *(const float *)t.scale;
    const uint8_t code = ((const uint8_t *)t.data)[i];
    return (t.format.dtype == E4M3 ? decode<E4M3>(code) : decode<E5M2>(code)) * s;
}

__device__ static inline uint8_t encode_any(DType d, float x)
{
    return d == E4M3 ? encode<E4M3>(x) : encode<E5M2>(x);
}

/* ---- to F32 or BF16 -------------------------------------------------------------------------- */

/* Stores eight elements per thread from `at` on, contiguous over the warp. NOTE: two plain stores
 * per thread would each use half of every sector. So two threads first swap halves. */
__device__ static inline void store_sectors(float *y, size_t at, const float (&x)[8], size_t n)
{
    const bool odd = threadIdx.x % 2;
    float first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[4 + i], 1);
        first[i] = odd ? other : x[i];
        second[i] = odd ? x[4 + i] : other;
    }
    const size_t to_first = odd ? at - 4 : at, to_second = odd ? at + 4 : at + 8;
    if (to_first < n)
        *(float4 *)(y + to_first) = make_float4(first[0], first[1], first[2], first[3]);
    if (to_second < n)
        *(float4 *)(y + to_second) = make_float4(second[0], second[1], second[2], second[3]);
}

template <class Reader>
__global__ __launch_bounds__(THREADS) void convert_kernel(AnyOut y, Reader x, size_t n)
{
    const size_t first = first_element();
    float v[PACKS][8];
    load_packs(v, x, first, n);
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const size_t at = first + 8 * j * THREADS;
        if (y.is_f32)
            store_sectors((float *)y.data, at, v[j], n);
        else if (at < n)
            store_pack<true>((bf16 *)y.data + at, v[j], 8);
    }
}

__global__ void convert_any_kernel(AnyOut y, AnyTensor x, size_t n)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) {
        if (y.is_f32)
            ((float *)y.data)[i] = element(x, i);
        else
            ((bf16 *)y.data)[i] = from_float<bf16>(element(x, i));
    }
}

/* ---- to FP8 with a scale per group ----------------------------------------------------------- */

/* Quantizes groups of 2^shift elements. Each group is in 2^(shift - 3) neighbouring threads. */
template <DType D, class Reader>
__global__ __launch_bounds__(THREADS) void quantize_groups_kernel(uint8_t *codes, uint8_t *scale,
                                                                  Reader x, size_t n, int shift)
{
    const size_t first = first_element();
    float v[PACKS][8];
    load_packs(v, x, first, n);
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const size_t at = first + 8 * j * THREADS;
        float amax = pack_abs_max(v[j]);
        for (int o = 1; o < 1 << (shift - 3); o <<= 1)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, o));
        const uint8_t s = fp8_group_scale(amax, D);
        if (at < n) {
            *(uint2 *)(codes + at) =
                encode_pack<D>(v[j], inverse_of_few_bits(fp8_group_value(s, D)));
            if (at % (1 << shift) == 0)
                scale[at >> shift] = s;
        }
    }
}

/* Each warp quantizes one group. */
__global__ void quantize_groups_any_kernel(AnyTensor y, AnyTensor x, size_t groups)
{
    const size_t g = ((size_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int group = y.format.group, lane = threadIdx.x % 32;
    if (g >= groups)
        return;
    float amax = 0;
    for (int i = lane; i < group; i += 32)
        amax = fmaxf(amax, fabsf(element(x, g * group + i)));
    const uint8_t s = fp8_group_scale(warp_max(amax), y.format.dtype);
    const float inverse = inverse_of_few_bits(fp8_group_value(s, y.format.dtype));
    for (int i = lane; i < group; i += 32)
        ((uint8_t *)y.data)[g * group + i] =
            encode_any(y.format.dtype, element(x, g * group + i) * inverse);
    if (lane == 0)
        ((uint8_t *)y.scale)[g] = s;
}

/* ---- to FP8 with one scale: the maximum ------------------------------------------------------ */

/* Computes the maxima of item blockIdx.y. Every item has n elements. */
template <class Reader>
__global__ __launch_bounds__(THREADS) void amax_kernel(float *partial, Reader x, size_t n)
{
    __shared__ float shared[32];
    float amax = 0;
    x = item_reader(x, blockIdx.y, n);
    const size_t step = 8 * (size_t)gridDim.x * PACKS * THREADS;
    for (size_t first = first_element(); first < n; first += step) {
        float v[PACKS][8];
        load_packs(v, x, first, n);
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            amax = fmaxf(amax, pack_abs_max(v[j]));
    }
    amax = block_max(amax, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.y * gridDim.x + blockIdx.x] = amax;
}

__global__ void amax_any_kernel(float *partial, AnyTensor x, size_t n)
{
    __shared__ float shared[32];
    float amax = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        amax = fmaxf(amax, fabsf(element(x, i)));
    amax = block_max(amax, shared);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = amax;
}

/* Sets the scale of item blockIdx.x from n maxima. scale_amax: the tensor's scale_amax; NULL: it has
 * none. headroom: 0 if the scale is not reused. */
__global__ __launch_bounds__(AMAX_BLOCKS) void scale_kernel(float *scale, float *scale_amax,
                                                            float headroom, const float *partial,
                                                            int n, DType d)
{
    __shared__ float shared[32];
    partial += blockIdx.x * n;
    scale += SCALE_FLOATS * blockIdx.x;
    const float amax = block_max(threadIdx.x < n ? partial[threadIdx.x] : 0.0f, shared);
    if (threadIdx.x > 0)
        return;
    const bool within = headroom > 0 && amax / headroom <= *scale_amax;
    *scale = (headroom > 0 ? headroom : 1.0f) * fp8_scale(within ? *scale_amax : amax, d);
    if (scale_amax && !within)
        *scale_amax = amax;
}

/* ---- to FP8 with one scale: the codes
 * --------------------------------------------------------- */

/* Writes the codes of item blockIdx.y. Every item has n elements. */
template <DType D, class Reader>
__global__ __launch_bounds__(THREADS) void encode_kernel(uint8_t *codes, const float *scale,
                                                         Reader x, size_t n)
{
    const size_t first = first_element();
    float v[PACKS][8];
    x = item_reader(x, blockIdx.y, n);
    codes += blockIdx.y * n;
    scale += SCALE_FLOATS * blockIdx.y;
    load_packs(v, x, first, n);
    const float inverse = 1.0f / *scale;
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        if (first + 8 * j * THREADS < n)
            *(uint2 *)(codes + first + 8 * j * THREADS) = encode_pack<D>(v[j], inverse);
}

/* Writes the codes and transposed codes of item blockIdx.z, in tiles. Every item has `rows` rows.
 * y: item 0. */
template <class Reader>
__global__ __launch_bounds__(TILE_THREADS, 3) void encode_tiles_kernel(TileOut y, Reader x,
                                                                       int rows)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    typedef ReaderSource<Reader> Source;
    const size_t n = (size_t)rows * x.cols;
    const Source source = { {}, item_reader(x, blockIdx.z, n) };
    y.data = y.data ? y.data + blockIdx.z * n : NULL;
    y.data_t += blockIdx.z * n;
    y.scale += SCALE_FLOATS * blockIdx.z;
    encode_tile<Source>({ { y } }, source, blockIdx.y * TILE_ROWS, blockIdx.x * TILE_COLS, rows,
                        x.cols, t);
}

/* Encodes y, whose scale is reused, and raises *amax to max|x|. */
template <class Reader>
__global__ __launch_bounds__(THREADS) void encode_in_range_kernel(float *amax, TileOut y, Reader x,
                                                                  size_t n)
{
    __shared__ float shared[32];
    const size_t first = first_element();
    float v[PACKS][8], m = 0;
    load_packs(v, x, first, n);
    const float inverse = 1.0f / tile_scale(y, *tile_scale_from(y));
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        m = fmaxf(m, pack_abs_max(v[j]));
        if (first + 8 * j * THREADS < n)
            *(uint2 *)(y.data + first + 8 * j * THREADS) = encode_pack(v[j], inverse, y.dtype);
    }
    raise_amax(amax, m, shared);
}

/* Encodes elements first .. end-1 of y. Elements from n on, the size of x, become 0. */
__global__ void encode_any_kernel(AnyTensor y, AnyTensor x, size_t first, size_t n, size_t end)
{
    const size_t i = first + (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= end)
        return;
    const uint8_t code =
        i < n ? encode_any(y.format.dtype, element(x, i) * (1.0f / *(const float *)y.scale)) : 0;
    if (y.data)
        ((uint8_t *)y.data)[i] = code;
    if (y.data_t)
        ((uint8_t *)y.data_t)[(i % y.cols) * y.rows + i / y.cols] = code;
}

/* ---- choice of kernel ------------------------------------------------------------------------ */

static AnyTensor any_tensor(Tensor t)
{
    return { t.data, t.data_t, t.scale, t.format, t.rows, t.cols };
}

/* Returns log2 of the group size (3 .. 8) if the fast kernels support the group, 0 for one scale,
 * else -1. */
static int group_shift(Tensor t)
{
    if (!t.format.group)
        return 0;
    for (int shift = 3; shift <= 8; shift++)
        if (t.format.group == 1 << shift)
            return shift;
    return -1;
}

static bool is_fast_source(Tensor x)
{
    return is_aligned(x, x.cols) && group_shift(x) >= 0;
}

static bool is_fast(Tensor y, Tensor x)
{
    return is_fast_source(x) && is_aligned(y, y.cols) && group_shift(y) >= 0 &&
           (!y.data_t || (y.rows % 16 == 0 && (uintptr_t)y.data_t % 16 == 0));
}

template <DType D, typename F>
static void with_codes(Tensor x, F f)
{
    const uint8_t *codes = (const uint8_t *)x.data;
    if (x.format.group)
        f(GroupReader<Known<D>, int>{
            codes, (const uint8_t *)x.scale, {}, group_shift(x), x.cols });
    else
        f(TensorReader<Known<D>>{ codes, (const float *)x.scale, {}, x.cols });
}

/* As with_reader, for any group size that is_fast_source accepts. The format is known at compile
 * time. */
template <typename F>
static void with_fast_reader(Tensor x, F f)
{
    switch (x.format.dtype) {
    case E4M3: with_codes<E4M3>(x, f); break;
    case E5M2: with_codes<E5M2>(x, f); break;
    default: with_dense_reader(x, f); /* check_format rejects other formats */
    }
}

static unsigned blocks_for(size_t n, size_t each)
{
    return (unsigned)ceil_div(n, each * THREADS);
}

static void to_plain(Tensor y, Tensor x, size_t n)
{
    if (is_fast(y, x))
        with_fast_reader(x, [&](auto reader) {
            convert_kernel<<<blocks_for(n, 8 * PACKS), THREADS, 0, device_stream()>>>(any_out(y),
                                                                                      reader, n);
        });
    else
        convert_any_kernel<<<blocks_for(n, 1), THREADS, 0, device_stream()>>>(any_out(y),
                                                                              any_tensor(x), n);
    LAUNCH_CHECK();
}

template <DType D>
static void to_groups(Tensor y, Tensor x, size_t n)
{
    const size_t groups = n / y.format.group;
    if (is_fast(y, x))
        with_fast_reader(x, [&](auto reader) {
            quantize_groups_kernel<D><<<blocks_for(n, 8 * PACKS), THREADS, 0, device_stream()>>>(
                (uint8_t *)y.data, (uint8_t *)y.scale, reader, n, group_shift(y));
        });
    else
        quantize_groups_any_kernel<<<blocks_for(32 * groups, 1), THREADS, 0, device_stream()>>>(
            any_tensor(y), any_tensor(x), groups);
    LAUNCH_CHECK();
}

/* Returns the number of rows that the fast kernels encode: a multiple of 16. Tiles may write into
 * later rows of y, so the caller writes the remaining rows after the tiles. */
static int fast_rows(Tensor y, Tensor x)
{
    return !is_fast(y, x) ? 0 : y.data_t ? x.rows / 16 * 16 : x.rows;
}

/* y and x: the first of `items` items, whose first `rows` rows are encoded. */
template <DType D>
static void encode_items(Tensor y, Tensor x, int items, int rows)
{
    const size_t n = (size_t)rows * x.cols;
    with_fast_reader(x, [&](auto reader) {
        if (y.data_t) {
            dim3 grid = tile_grid(rows, x.cols);
            grid.z = items;
            encode_tiles_kernel<<<grid, TILE_THREADS, 0, device_stream()>>>(tile_out(y, NULL),
                                                                            reader, rows);
        } else
            encode_kernel<D>
                <<<dim3(blocks_for(n, 8 * PACKS), items), THREADS, 0, device_stream()>>>(
                    (uint8_t *)y.data, (const float *)y.scale, reader, n);
    });
    LAUNCH_CHECK();
}

template <DType D>
static void to_codes(Tensor y, Tensor x)
{
    const int fast = fast_rows(y, x);
    const size_t done = (size_t)fast * x.cols, end = tensor_numel(y);
    if (fast > 0)
        encode_items<D>(y, x, 1, fast);
    if (done < end)
        encode_any_kernel<<<blocks_for(end - done, 1), THREADS, 0, device_stream()>>>(
            any_tensor(y), any_tensor(x), done, tensor_numel(x), end);
    LAUNCH_CHECK();
}

template <DType D>
static void to_fp8(Tensor y, Tensor x, size_t n)
{
    if (y.format.group)
        to_groups<D>(y, x, n);
    else
        to_codes<D>(y, x);
}

/* A source that also writes the values as rows of type T. */
template <class Reader, typename T>
struct ExpandSource : ReaderSource<Reader> {
    T *to;
    __device__ void values(float (&y)[1][8], const typename Reader::Raw &raw,
                           typename ReaderSource<Reader>::Fix, int row, int col) const
    {
        this->x.values(y[0], raw);
        store_pack<true>(to + (size_t)row * this->x.cols + col, y[0], 8);
    }
};

template <DType D>
static void expand(Tensor y, Tensor x)
{
    const TensorReader<Known<D>> reader = {
        (const uint8_t *)x.data, (const float *)x.scale, {}, x.cols
    };
    Tensor columns = x;
    columns.data = NULL;
    with_type(y, [&](auto *to) {
        typedef ExpandSource<TensorReader<Known<D>>, std::remove_pointer_t<decltype(to)>> Source;
        fp8_tiles<Source>({ { tile_out(columns, NULL) } }, { { {}, reader }, to }, x.rows, x.cols);
    });
}

/* ---- entry ----------------------------------------------------------------------------------- */

static void check_format(const char *op, Tensor t)
{
    if (format_is_dynamic8(t.format))
        die("%s: the CUDA back end has no conversion of %s; only adamw8bit reads and writes it", op,
            format_name(t.format));
    CHECK(!format_is_fp8(t.format) || !t.format.group || format_has_byte_scales(t.format),
          "%s: %s is a format of moments, which only adamw reads and writes", op,
          format_name(t.format));
}

/* Sets the scale of each item of y from n maxima. */
static void set_scales(Tensor y, const float *maxima, int n, int items)
{
    check_scaled(y);
    const int threads = block_threads(n > 0 ? n : 1, 1, AMAX_BLOCKS);
    scale_kernel<<<items, threads, 0, device_stream()>>>(
        (float *)y.scale, y.scale_amax, scale_is_reused(y) ? fp8_headroom(y.format.dtype) : 0,
        maxima, n, y.format.dtype);
    LAUNCH_CHECK();
}

void backend_quantize_scale_from(Tensor y, const float *amax)
{
    set_scales(y, amax, 1, 1);
}

/* y and x: the first of `items` items. */
static void measure_items(const char *op, Tensor y, Tensor x, int items)
{
    check_tensor(op, "x", x, x.rows, x.cols);
    check_format(op, x);
    const size_t n = tensor_numel(x), needed = ceil_div(n, 8 * PACKS * THREADS);
    const int blocks = needed < AMAX_BLOCKS ? (int)needed : AMAX_BLOCKS;
    float *partial =
        (float *)device_scratch((size_t)items * AMAX_BLOCKS * sizeof(float), SCRATCH_0);
    if (blocks > 0) {
        if (is_fast_source(x))
            with_fast_reader(x, [&](auto reader) {
                amax_kernel<<<dim3(blocks, items), THREADS, 0, device_stream()>>>(partial, reader,
                                                                                  n);
            });
        else
            amax_any_kernel<<<blocks, THREADS, 0, device_stream()>>>(partial, any_tensor(x), n);
        LAUNCH_CHECK();
    }
    set_scales(y, partial, blocks, items);
}

void backend_quantize_scale(Tensor y, Tensor x)
{
    measure_items(OPERATION, y, x, 1);
}

void backend_quantize_item_scales(Tensor y, Tensor x, int items)
{
    check_items(OPERATION, y, x, items);
    const Tensor first = tensor_item(x, 0, items);
    if (is_fast_source(first))
        measure_items(OPERATION, tensor_item(y, 0, items), first, items);
    else
        for (int i = 0; i < items; i++)
            backend_quantize_scale(tensor_item(y, i, items), tensor_item(x, i, items));
}

void backend_quantize_codes(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    check_quantized(y, x);
    check_format(OPERATION, x);
    check_format(OPERATION, y);
    const size_t n = tensor_numel(x);
    if (tensor_numel(y) == 0)
        return;
    if (!format_is_fp8(y.format))
        to_plain(y, x, n);
    else if (y.format.dtype == E4M3)
        to_fp8<E4M3>(y, x, n);
    else
        to_fp8<E5M2>(y, x, n);
}

void backend_quantize_item_codes(Tensor y, Tensor x, int items)
{
    check_items(OPERATION, y, x, items);
    const Tensor to = tensor_item(y, 0, items), from = tensor_item(x, 0, items);
    if (items == 1 || !(format_has_scales(y.format) || format_has_scales(x.format)))
        backend_quantize_codes(y, x);
    else if (format_is_fp8(y.format) && fast_rows(to, from) == from.rows)
        (y.format.dtype == E4M3 ? encode_items<E4M3> : encode_items<E5M2>)(to, from, items,
                                                                           from.rows);
    else
        for (int i = 0; i < items; i++)
            backend_quantize_codes(tensor_item(y, i, items), tensor_item(x, i, items));
}

void backend_expand_operand(Tensor y, Tensor x)
{
    check_expand_operand(y, x);
    Tensor columns = x, rows = x;
    columns.data = NULL;
    rows.data_t = NULL;
    if (!is_fast(x, x) || !is_aligned(y, y.cols)) {
        backend_quantize_codes(y, rows);
        backend_quantize_codes(columns, rows);
    } else if (x.format.dtype == E4M3)
        expand<E4M3>(y, x);
    else
        expand<E5M2>(y, x);
}

/* A dense x takes one pass. */
void backend_quantize_in_range(Tensor y, Tensor x)
{
    const size_t n = tensor_numel(x);
    if (format_has_scales(x.format) || !is_fast(y, x) || y.rows % 16 || y.cols % 16 || n == 0) {
        backend_quantize_scale(y, x);
        backend_quantize_codes(y, x);
        return;
    }
    with_dense_reader(x, [&](auto reader) {
        typedef ReaderSource<decltype(reader)> Source;
        const Source source = { {}, reader };
        if (y.data_t)
            fp8_in_range<Source>(y, {}, source, x.rows, x.cols);
        else {
            const AmaxProbe probe = amax_probe_new();
            encode_in_range_kernel<<<blocks_for(n, 8 * PACKS), THREADS, 0, device_stream()>>>(
                probe.amax, tile_out_in_range(y, probe), reader, n);
            LAUNCH_CHECK();
            fp8_recode(y, probe, source, x.rows, x.cols);
        }
    });
}
