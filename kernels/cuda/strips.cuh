/* Computes xa wT in registers, for lora_widen and for operations that add an adapter's product to
 * their input.
 *
 * A row's columns are divided into strips of 32. A block holds w for its columns in shared memory,
 * in the layout of tensor-core operands, and loops over tokens. A warp has two strips, neighbouring
 * or not, of 16 M tokens at a time. The columns of a product have an order that gives a thread
 * eight neighbours of a row: lane 4 g + t has columns 8 t .. 8 t + 7 of both strips, for tokens g,
 * g + 8, ... */
#pragma once
#include "kernels/cuda/lora.cuh"
#include "kernels/cuda/tiles.cuh"

constexpr int STRIP = 32, STRIP_WARPS = 8;
constexpr int STRIP_BYTES = 96 * 1024; /* bytes of shared memory that all GPUs have */

/* The layout of w in shared memory. */
struct Layout {
    int column_warps; /* number of warps with different columns; other warps have other tokens */
    /* number of tensor-core steps per product; a step sums over 16 ranks of the adapter */
    int steps;
};

/* Arguments of kernels. If xa_aligned, rows of xa can be loaded four elements at a time. If
 * w_aligned, ranks are contiguous in w, and w can be loaded four elements at a time. */
struct Product {
    const bf16 *xa, *w;
    LoraProjections projections;
    Layout layout;
    bool xa_aligned, w_aligned;
};

/* at: index in w of a strip's first column; left: columns of the projection from this column on; <=
 * 0: no columns. */
struct Strip {
    size_t at;
    int left;
};

/* Returns the strip that begins at this column of a projection. */
__device__ inline Strip strip_of(const LoraProjections &projections,
                                 const LoraProjection &projection, int column)
{
    return { projection.at + column * projections.by_column, projection.width - column };
}

/* Returns the bytes of shared memory of a block, with `each` further bytes per warp of columns. */
static inline int strip_bytes(Layout l, int each)
{
    return l.column_warps * (l.steps * 4 * 32 * (int)sizeof(uint4) + each);
}

/* Returns false if the formats are not supported, or shared memory is too small for the rank. */
static inline bool choose_product(Product *p, Tensor xa, Tensor w, LoraProjections projections,
                                  int each)
{
    Layout l = { STRIP_WARPS, (int)ceil_div(projections.rank, 16) };
    while (l.column_warps > 1 && strip_bytes(l, each) > STRIP_BYTES)
        l.column_warps /= 2;
    const bool fours = projections.rank % 4 == 0;
    *p = { (const bf16 *)xa.data,
           (const bf16 *)w.data,
           projections,
           l,
           fours && xa.cols % 4 == 0 && (uintptr_t)xa.data % 8 == 0,
           fours && projections.by_rank == 1 && (uintptr_t)w.data % 8 == 0 };
    return xa.format.dtype == BF16 && w.format.dtype == BF16 && strip_bytes(l, each) <= STRIP_BYTES;
}

/* Loads elements j .. j + 3 of a row of `width` elements. Elements after its end become 0. */
__device__ inline uint2 load_four(const bf16 *row, int j, int width, bool aligned)
{
    if (aligned && j + 4 <= width)
        return *(const uint2 *)(row + j);
    uint32_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        bits[e] = j + e < width ? element_bits(row + j + e) : 0;
    return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

/* Stores w in shared memory. Packs are indexed [warp][step][pair of groups of eight columns][lane 4
 * g + t]. A pack holds ranks 16 step + 4 t to 16 step + 4 t + 3 of column g of both groups. Column
 * g of group q (q < 4) is column 8 (g/2) + 2 q + g % 2 of a strip. Elements after the projection's
 * last column or after the last rank are 0. strip(i): the block's i-th strip, which belongs to warp
 * i/2. */
template <class F>
__device__ inline void hold_matrix(uint4 *packs, const Product &p, F strip)
{
    const int columns = p.layout.column_warps * 2 * STRIP, quads = 4 * p.layout.steps;
    const bool ranks_first = p.projections.by_rank == 1;
    for (int i = threadIdx.x; i < columns * quads; i += 32 * STRIP_WARPS) {
        const int quad = ranks_first ? i % quads : i / columns,
                  c = ranks_first ? i / quads : i % columns;
        const Strip s = strip(c / STRIP);
        const bf16 *from = p.w + s.at + c % STRIP * p.projections.by_column;
        const int rank = c % STRIP < s.left ? p.projections.rank : 0;
        uint2 bits;
        if (ranks_first)
            bits = load_four(from, 4 * quad, rank, p.w_aligned);
        else {
            uint32_t bit[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                bit[e] = 4 * quad + e < rank
                             ? element_bits(from + (4 * quad + e) * p.projections.by_rank)
                             : 0;
            bits = make_uint2(bit[0] | bit[1] << 16, bit[2] | bit[3] << 16);
        }
        const int g = c / 8 % 4 * 2 + c % 2, q = c / 2 % 4, pair = c / STRIP % 2 * 2 + q / 2;
        const int at =
            ((c / (2 * STRIP) * p.layout.steps + quad / 4) * 4 + pair) * 32 + 4 * g + quad % 4;
        ((uint2 *)packs)[2 * at + q % 2] = bits;
    }
}

/* Adds the product to sum [16 tokens][strip, group q of eight columns][k]. Index k stands for
 * column 2 q + k % 2 of the thread's token 8 (k / 2). matrix: the warp's packs, from the lane's
 * first pack on. first: token of m = 0. xa[h]: first column of strip h in xa; < 0: no product. */
template <int M>
__device__ inline void add_product(float (&sum)[M][8][4], const uint4 *matrix, const Product &p,
                                   const int (&xa)[2], int first, int end)
{
    const int xa_cols = p.projections.count * p.projections.rank;
    for (int step = 0; step < p.layout.steps; step++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < 2 * M; m++) {
                const int token = first + 8 * m, j = 16 * step + threadIdx.x % 4 * 4;
                const bf16 *row = p.xa + (size_t)token * xa_cols + xa[h];
                const uint2 two = load_four(
                    row, j, token < end && xa[h] >= 0 ? p.projections.rank : 0, p.xa_aligned);
                a[m / 2][m % 2] = two.x;
                a[m / 2][m % 2 + 2] = two.y;
            }
#pragma unroll
            for (int pair = 2 * h; pair < 2 * h + 2; pair++) {
                const uint4 b = matrix[(step * 4 + pair) * 32];
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply_add(sum[m][2 * pair], a[m], b.x, b.y);
                    multiply_add(sum[m][2 * pair + 1], a[m], b.z, b.w);
                }
            }
        }
}

/* Returns the element of sum for column k of the thread's eight columns in strip h, for its token 8
 * i. */
template <int M>
__device__ inline float &strip_element(float (&sum)[M][8][4], int i, int h, int k)
{
    return sum[i / 2][4 * h + k / 2][i % 2 * 2 + k % 2];
}
