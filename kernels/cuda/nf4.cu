/* The operations of NF4.
 *
 * nf4_dequantize runs before every use of a matrix. This operation reads 0.52 bytes per element and
 * writes y. A thread computes packs of eight elements from four bytes of codes. The lanes of each
 * half of a warp hold the 16 values of the map, and a shuffle by the code reads a value. In shared
 * memory random codes would cause bank conflicts. tiles.cuh writes transposed codes. The arithmetic
 * uses intrinsics that the compiler does not fuse, so all bits equal those of the specification. */
#include "kernels/cuda/tiles.cuh"
extern "C" {
#include "kernels/dynamic8.h"
#include "kernels/nf4_map.h"
}

enum { THREADS = 256, PACKS = 4, BLOCKS = NF4_GROUP / NF4_BLOCK };
static_assert(THREADS == BLOCKS, "a thread has one block of a group");

struct Nf4Tables {
    float nf4[16], absmax[256];
};

/* Returns the tables in device memory. All calls share them. */
static const Nf4Tables *device_tables(void)
{
    static Nf4Tables *tables;
    if (!tables) {
        Nf4Tables host;
        memcpy(host.nf4, nf4_map(), sizeof host.nf4);
        memcpy(host.absmax, dynamic8_map(DYNAMIC8), sizeof host.absmax);
        tables = (Nf4Tables *)device_alloc(sizeof host);
        backend_device_put(tables, &host, sizeof host);
        device_sync(); /* because later calls may use other queues */
    }
    return tables;
}

/* The stored absmax of a block, in registers. */
template <typename Group>
struct Nf4Scale;
template <>
struct Nf4Scale<Nf4Group> {
    uint8_t code;
    float2 nested;
    __device__ static Nf4Scale load(const Nf4Group *g, unsigned block)
    {
        return { g->absmax[block], *(const float2 *)&g->nested };
    }
    __device__ float absmax(const Nf4Tables *tables) const
    {
        return __fadd_rn(__fmul_rn(nested.x, tables->absmax[code]), nested.y);
    }
};
template <>
struct Nf4Scale<Nf4PlainGroup> {
    float value;
    __device__ static Nf4Scale load(const Nf4PlainGroup *g, unsigned block)
    {
        return { g->absmax[block] };
    }
    __device__ float absmax(const Nf4Tables *) const
    {
        return value;
    }
};
static_assert(offsetof(Nf4Group, nested) % sizeof(float2) == 0 && sizeof(Nf4Group) % 16 == 0 &&
                  sizeof(Nf4PlainGroup) % 16 == 0,
              "what is loaded at once is aligned");

/* ---- from a tensor --------------------------------------------------------------------------- */

__device__ static inline float element(AnyIn w, size_t i)
{
    return w.is_f32 ? ((const float *)w.data)[i] : to_float(((const bf16 *)w.data)[i]);
}

/* Returns the number of elements of the block that begins at `first`, or 0 if the block is after
 * the end. */
__device__ static inline int block_size(size_t first, size_t numel)
{
    return first < numel ? (int)min((size_t)NF4_BLOCK, numel - first) : 0;
}

__device__ static inline float block_absmax(AnyIn w, size_t first, int n)
{
    float top = 0;
    for (int i = 0; i < n; i++)
        top = fmaxf(top, fabsf(element(w, first + i)));
    return top;
}

__global__ void nf4_absmax_kernel(float *absmax, AnyIn w, size_t numel)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const int n = block_size(i * NF4_BLOCK, numel);
    if (n > 0)
        absmax[i] = block_absmax(w, i * NF4_BLOCK, n);
}

/* Runs in one thread block. */
__global__ void nf4_mean_kernel(float *mean, const float *x, size_t n)
{
    __shared__ double sum[THREADS];
    double own = 0, total = 0;
    for (size_t i = threadIdx.x; i < n; i += THREADS)
        own += x[i];
    sum[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int i = 0; i < THREADS; i++)
        total += sum[i];
    *mean = (float)(total / (double)n);
}

void backend_nf4_offset(float *offset, Tensor w)
{
    nf4_check_source(OPERATION, w, 0, 0);
    const size_t numel = tensor_numel(w), blocks = ceil_div(numel, NF4_BLOCK);
    float *absmax = (float *)device_scratch(blocks * sizeof *absmax, SCRATCH_0);
    nf4_absmax_kernel<<<(unsigned)ceil_div(blocks, THREADS), THREADS, 0, device_stream()>>>(
        absmax, any_in(w), numel);
    LAUNCH_CHECK();
    nf4_mean_kernel<<<1, THREADS, 0, device_stream()>>>(offset, absmax, blocks);
    LAUNCH_CHECK();
}

/* Stores the codes of this thread's block, which has n elements from `start` on. */
__device__ static inline void quantize_block(uint8_t *codes, AnyIn w, size_t start, int n,
                                             float absmax, const float *map)
{
    const float inverse = 1.0f / absmax;
    for (int i = 0; i < NF4_BLOCK; i += 2) {
        const uint8_t high = i < n ? nf4_nearest(map, element(w, start + i) * inverse) : 0;
        const uint8_t low = i + 1 < n ? nf4_nearest(map, element(w, start + i + 1) * inverse) : 0;
        codes[threadIdx.x * NF4_BLOCK / 2 + i / 2] = (uint8_t)(high << 4 | low);
    }
}

/* Each thread block quantizes one group. */
__global__ void nf4_quantize_kernel(Nf4Group *to, AnyIn w, const float *offset, size_t first,
                                    size_t numel, const Nf4Tables *tables)
{
    __shared__ float shared[32], map[16];
    const size_t start = (first + blockIdx.x) * NF4_GROUP + (size_t)threadIdx.x * NF4_BLOCK;
    const int n = block_size(start, numel);
    const float absmax = block_absmax(w, start, n), rest = n > 0 ? absmax - *offset : 0.0f;
    Nf4Group *g = to + blockIdx.x;
    if (threadIdx.x < 16)
        map[threadIdx.x] = tables->nf4[threadIdx.x];
    /* this call also makes the map visible to all threads */
    const float nested = block_max(fabsf(rest), shared);
    quantize_block(g->codes, w, start, n, absmax, map);
    g->absmax[threadIdx.x] = n > 0 ? dynamic8_nearest(tables->absmax, rest * (1.0f / nested)) : 0;
    if (threadIdx.x == 0) {
        g->nested = nested;
        g->offset = *offset;
        g->unused[0] = g->unused[1] = 0;
    }
}

__global__ void nf4_plain_kernel(Nf4PlainGroup *to, AnyIn w, size_t first, size_t numel,
                                 const Nf4Tables *tables)
{
    __shared__ float map[16];
    const size_t start = (first + blockIdx.x) * NF4_GROUP + (size_t)threadIdx.x * NF4_BLOCK;
    const int n = block_size(start, numel);
    const float absmax = block_absmax(w, start, n);
    if (threadIdx.x < 16)
        map[threadIdx.x] = tables->nf4[threadIdx.x];
    __syncthreads();
    quantize_block(to[blockIdx.x].codes, w, start, n, absmax, map);
    to[blockIdx.x].absmax[threadIdx.x] = absmax;
}

void backend_nf4_quantize_plain(Nf4PlainGroup *to, Tensor w, size_t first, size_t count)
{
    nf4_check_source(OPERATION, w, first, count);
    if (count == 0)
        return;
    nf4_plain_kernel<<<(unsigned)count, THREADS, 0, device_stream()>>>(
        to, any_in(w), first, tensor_numel(w), device_tables());
    LAUNCH_CHECK();
}

void backend_nf4_quantize(Nf4Group *to, Tensor w, const float *offset, size_t first, size_t count)
{
    nf4_check_source(OPERATION, w, first, count);
    if (count == 0)
        return;
    nf4_quantize_kernel<<<(unsigned)count, THREADS, 0, device_stream()>>>(
        to, any_in(w), offset, first, tensor_numel(w), device_tables());
    LAUNCH_CHECK();
}

/* ---- to a tensor ----------------------------------------------------------------------------- */

/* The group of element i of the matrix, and the index of the element in this group. start: first
 * elements of the second and of the third part; SIZE_MAX if a part does not exist. */
template <typename Group>
struct Nf4Position {
    const Group *group;
    unsigned at;
};
template <typename Group>
struct Nf4Parts {
    const Group *group[3];
    size_t start[2];
    size_t groups; /* of a matrix */
    __host__ __device__ Nf4Parts item(unsigned i) const
    {
        return { { group[0] + i * groups, group[1] + i * groups, group[2] + i * groups },
                 { start[0], start[1] },
                 groups };
    }
    __device__ Nf4Position<Group> position(size_t i) const
    {
        const bool second = i >= start[0], third = i >= start[1];
        const Group *g = third ? group[2] : second ? group[1] : group[0];
        i -= third ? start[1] : second ? start[0] : 0;
        return { g + i / NF4_GROUP, (unsigned)(i % NF4_GROUP) };
    }
};

/* groups is x.group or x.plain. */
template <typename Group>
static Nf4Parts<Group> parts_of(Nf4 x, const Group *groups, int cols)
{
    Nf4Parts<Group> p = { { groups, groups, groups }, { SIZE_MAX, SIZE_MAX }, 0 };
    for (int i = 0; i < x.num_tensors; i++)
        p.groups += nf4_groups((size_t)x.rows[i], (size_t)cols);
    for (int i = 1; i < x.num_tensors; i++) {
        p.group[i] = p.group[i - 1] + nf4_groups((size_t)x.rows[i - 1], (size_t)cols);
        p.start[i - 1] = (i > 1 ? p.start[0] : 0) + (size_t)x.rows[i - 1] * (size_t)cols;
    }
    return p;
}

/* Reads packs of a matrix whose rows are multiples of eight elements, so that no pack crosses a
 * block. */
template <typename Group>
struct Nf4Reader {
    Nf4Parts<Group> parts;
    const Nf4Tables *tables;
    struct Raw {
        uint32_t codes;
        Nf4Scale<Group> scale;
    };
    __device__ Raw at(size_t i) const
    {
        const Nf4Position<Group> p = parts.position(i);
        return { *(const uint32_t *)(p.group->codes + p.at / 2),
                 Nf4Scale<Group>::load(p.group, p.at / NF4_BLOCK) };
    }
    /* Returns this lane's value of the map, for shuffles. */
    __device__ float lane_value() const
    {
        return tables->nf4[threadIdx.x % 16];
    }
    /* All threads of a warp must call this function. */
    __device__ void values(float (&x)[8], const Raw &raw, float lane_value) const
    {
        const float absmax = raw.scale.absmax(tables);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = __fmul_rn(__shfl_sync(0xffffffffu, lane_value, raw.codes >> (4 * (i ^ 1)), 16),
                             absmax);
    }
};

/* The values of an NF4 matrix as a Source of tiles.cuh. */
template <typename Group>
struct Nf4Source {
    enum { OUTPUTS = 1, MEASURED = 1 };
    Nf4Reader<Group> x;
    int cols;
    typedef typename Nf4Reader<Group>::Raw Raw;
    typedef float Fix;
    __device__ Fix prepare(int) const
    {
        return x.lane_value();
    }
    __device__ int column(int, int col) const
    {
        return col;
    }
    __device__ int end(int rows) const
    {
        return rows;
    }
    __device__ Raw fetch(int row, int col) const
    {
        return x.at((size_t)row * cols + col);
    }
    __device__ void values(float (&y)[1][8], const Raw &raw, Fix fix, int, int) const
    {
        x.values(y[0], raw, fix);
    }
};

/* Output rows in F32, BF16 or FP8. */
struct Nf4Rows {
    void *data;
    DType dtype;
    const float *scale;
    /* Returns the output of matrix i. Every matrix has n elements. */
    __host__ __device__ Nf4Rows item(unsigned i, size_t n) const
    {
        const size_t bytes = dtype == F32 ? 4 : dtype == BF16 ? 2 : 1;
        return { data ? (char *)data + i * n * bytes : NULL, dtype,
                 scale ? scale + SCALE_FLOATS * i : NULL };
    }
};

/* Converts matrix blockIdx.y. Every matrix has n elements. */
template <typename Group>
__global__ __launch_bounds__(THREADS) void nf4_rows_kernel(Nf4Rows y, Nf4Reader<Group> x, size_t n)
{
    y = y.item(blockIdx.y, n);
    x.parts = x.parts.item(blockIdx.y);
    const size_t first = 8 * ((size_t)blockIdx.x * PACKS * THREADS + threadIdx.x);
    typename Nf4Reader<Group>::Raw raw[PACKS];
#pragma unroll
    for (int j = 0; j < PACKS; j++)
        raw[j] = x.at(min(first + 8 * j * THREADS, n - 8));
    const float lane_value = x.lane_value(), inverse = y.scale ? 1.0f / *y.scale : 0.0f;
#pragma unroll
    for (int j = 0; j < PACKS; j++) {
        const size_t at = first + 8 * j * THREADS;
        float v[8];
        x.values(v, raw[j], lane_value);
        if (at >= n)
            continue;
        if (y.dtype == BF16)
            store_pack<true>((bf16 *)y.data + at, v, 8);
        else if (y.dtype == F32)
            store_pack<true>((float *)y.data + at, v, 8);
        else
            *(uint2 *)((uint8_t *)y.data + at) = encode_pack(v, inverse, y.dtype);
    }
}

/* Converts matrix blockIdx.z to codes and transposed codes. y: matrix 0. */
template <typename Group>
__global__ __launch_bounds__(TILE_THREADS,
                             3) void nf4_tiles_kernel(TileOut y, Nf4Source<Group> source, int rows)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    const size_t first = (size_t)blockIdx.z * rows * source.cols;
    source.x.parts = source.x.parts.item(blockIdx.z);
    y.data = y.data ? y.data + first : NULL;
    y.data_t += first;
    y.scale += SCALE_FLOATS * blockIdx.z;
    encode_tile<Nf4Source<Group>>({ { y } }, source, blockIdx.y * TILE_ROWS, blockIdx.x * TILE_COLS,
                                  rows, source.cols, t);
}

/* Converts rows of any width, element by element. data_t: transposed codes, for FP8 only. */
template <typename Group>
__global__ void nf4_any_kernel(Nf4Rows y, uint8_t *data_t, int rows, int cols,
                               Nf4Parts<Group> parts, const Nf4Tables *tables)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)rows * cols)
        return;
    const Nf4Position<Group> p = parts.position(i);
    const int code = p.group->codes[p.at / 2] >> (p.at % 2 ? 0 : 4) & 15;
    const float x = __fmul_rn(tables->nf4[code],
                              Nf4Scale<Group>::load(p.group, p.at / NF4_BLOCK).absmax(tables));
    if (y.dtype == BF16)
        ((bf16 *)y.data)[i] = from_float<bf16>(x);
    else if (y.dtype == F32)
        ((float *)y.data)[i] = x;
    else {
        const float scaled = x * (1.0f / *y.scale);
        const uint8_t e = y.dtype == E4M3 ? encode<E4M3>(scaled) : encode<E5M2>(scaled);
        if (y.data)
            ((uint8_t *)y.data)[i] = e;
        if (data_t)
            data_t[(i % cols) * rows + i / cols] = e;
    }
}

template <typename Group>
static void dequantize(Tensor y, Nf4 x, const Group *groups)
{
    const int items = nf4_items(x);
    y.rows /= items;
    const size_t n = tensor_numel(y);
    const Nf4Parts<Group> parts = parts_of(x, groups, y.cols);
    const Nf4Rows out = { y.data, y.format.dtype, (const float *)y.scale };
    const Nf4Reader<Group> reader = { parts, device_tables() };
    if (n == 0)
        return;
    if (y.cols % 8 || (uintptr_t)y.data % 16 || (uintptr_t)y.data_t % 16 || (items > 1 && n % 16) ||
        (y.data_t && y.rows % 16))
        for (int i = 0; i < items; i++)
            nf4_any_kernel<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, device_stream()>>>(
                out.item(i, n), y.data_t ? (uint8_t *)y.data_t + i * n : NULL, y.rows, y.cols,
                parts.item(i), reader.tables);
    else if (y.data_t) {
        dim3 grid = tile_grid(y.rows, y.cols);
        grid.z = items;
        nf4_tiles_kernel<Group><<<grid, TILE_THREADS, 0, device_stream()>>>(
            tile_out(y, NULL), { reader, y.cols }, y.rows);
    } else
        nf4_rows_kernel<<<dim3((unsigned)ceil_div(n, 8 * PACKS * THREADS), items), THREADS, 0,
                          device_stream()>>>(out, reader, n);
    LAUNCH_CHECK();
}

void backend_nf4_dequantize(Tensor y, Nf4 x)
{
    nf4_check_matrix(OPERATION, y, x);
    if (x.plain)
        dequantize(y, x, x.plain);
    else
        dequantize(y, x, x.group);
}

template <typename Group>
__global__ void nf4_amax_kernel(float *amax, Nf4 x, const Group *groups, int cols, size_t first,
                                const Nf4Tables *tables)
{
    __shared__ float shared[32];
    const bool is_block = (int)threadIdx.x < nf4_blocks(x, cols, first + blockIdx.x);
    const float absmax =
        is_block ? Nf4Scale<Group>::load(groups + blockIdx.x, threadIdx.x).absmax(tables) : 0.0f;
    raise_amax(amax, fabsf(absmax), shared);
}

void backend_nf4_amax(float *amax, Nf4 x, int cols, size_t first, size_t count)
{
    if (count == 0)
        return;
    if (x.plain)
        nf4_amax_kernel<<<(unsigned)count, THREADS, 0, device_stream()>>>(amax, x, x.plain, cols,
                                                                          first, device_tables());
    else
        nf4_amax_kernel<<<(unsigned)count, THREADS, 0, device_stream()>>>(amax, x, x.group, cols,
                                                                          first, device_tables());
    LAUNCH_CHECK();
}
