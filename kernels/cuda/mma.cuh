/* Products of tiles by a warp (mma.sync), and their operands, for compute capability 8.0 and later
 * [PTX ISA 8.0, sec. 9.7].
 *
 * A tile in shared memory consists of rows of BF16 or F32. 16 unused bytes follow each row, so that
 * 16-byte pieces of eight consecutive rows use all 32 banks. A step of a product sums 32 bytes of a
 * row, which are DEPTH elements.
 *
 * d (16, 8) += a (16, DEPTH) b (DEPTH, 8). In d[0 .. 3], lane l holds two numbers of row l/4, then
 * two numbers of row l/4 + 8, in columns 2(l%4) and 2(l%4) + 1. The rows of an operand's tile are
 * rows of a or columns of b, and the sum runs along the tile's rows. If an operand is read "by
 * columns", the sum runs down the tile's rows.
 *
 * A BF16 product takes one instruction. An F32 number is the sum of two TF32 numbers of 11 bits
 * each, and an F32 product takes three instructions. The product omits two terms: the product of
 * the two small parts, and the rounding of the small parts. These terms are within 2^-21 of each
 * product, mostly within 2^-24. */
#pragma once
#include "kernels/cuda/cuda.h"

/* ---- instructions ---------------------------------------------------------------------------- */

/* Starts the copy of 16 or 4 bytes to shared memory. Copies zeros if `there` is false. */
__device__ inline void copy_16(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}
__device__ inline void copy_4(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 4 : 0)
                 : "memory");
}

/* Waits for all copies that this thread started. */
__device__ inline void copies_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Loads four matrices of 8 rows of 16 bytes. Lane 8i + r has the address of row r of matrix i. x[i]
 * of lane l is 4-byte word l % 4 of row l/4 of matrix i. The transposed load, for 2-byte elements,
 * gives lane l column l/4 of rows 2(l%4) and 2(l%4) + 1. */
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ inline uint32_t load_word(uint32_t at)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

__device__ inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t round_tf32(float x)
{
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

/* For two warps of a block: one warp arrives without waiting, the other warp waits for this
 * arrival. Barrier 0 is __syncthreads's. */
__device__ inline void pair_arrive(int number)
{
    asm volatile("bar.arrive %0, 64;" ::"r"(number) : "memory");
}
__device__ inline void pair_wait(int number)
{
    asm volatile("bar.sync %0, 64;" ::"r"(number) : "memory");
}

/* A number in global memory that orders thread blocks. */
__device__ inline void turn_wait(const int *turn, int value)
{
    int now;
    do
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    while (now != value);
}
__device__ inline void turn_set(int *turn, int value)
{
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
}

/* *to += x in the L2 cache, without waiting. Added holds the floats that one instruction adds. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
typedef float4 Added;
__device__ inline Added plus(Added a, Added b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ inline void add_floats(Added *to, Added x)
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
#else
typedef float Added;
__device__ inline Added plus(Added a, Added b)
{
    return a + b;
}
__device__ inline void add_floats(Added *to, Added x)
{
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
#endif
static constexpr int ADDED = sizeof(Added) / sizeof(float);

/* ---- operands -------------------------------------------------------------------------------- */

template <typename T>
constexpr int DEPTH = 32 / sizeof(T);
/* bytes per row of a tile */
template <typename T, int COLUMNS>
constexpr int PITCH = COLUMNS * (int)sizeof(T) + 16;

/* Offset of a lane's row in four matrices of a tile, which are 16 rows of 32 bytes. The second
 * matrix is below the first or, with `beside`, to its right. The registers are passed to products
 * in this order, so it defines the order of operands. */
template <int ROW>
__device__ inline int lane_offset(bool beside)
{
    const int lane = threadIdx.x % 32, low = lane / 8 % 2, high = lane / 16;
    return (lane % 8 + 8 * (beside ? high : low)) * ROW + 16 * (beside ? low : high);
}

/* An operand by rows. operator() loads its i-th 16 rows (of a) or columns (of b) for step k. For b,
 * x[0] and x[1] are the first eight columns, x[2] and x[3] the other eight. ROW: bytes per row of
 * the tile. */
template <int ROW, bool B>
struct Along {
    uint32_t at;

    __device__ Along(uint32_t tile) : at(tile + lane_offset<ROW>(B))
    {
    }
    __device__ void operator()(uint32_t (&x)[4], int i, int k) const
    {
        load_matrices(x, at + i * 16 * ROW + k * 32);
    }
};

/* An operand by columns. In F32 the sum has another order, the order of Weights: lane l has rows
 * 2(l%4) and 2(l%4) + 1. */
template <typename T, int ROW, bool B>
struct Down {
    uint32_t at;

    __device__ Down(uint32_t tile)
    {
        const int lane = threadIdx.x % 32;
        at = tile + (sizeof(T) == 2 ? lane_offset<ROW>(!B) : lane % 4 * 2 * ROW + lane / 4 * 4);
    }
    __device__ void operator()(uint32_t (&x)[4], int i, int k) const
    {
        const uint32_t from = at + k * DEPTH<T> * ROW + i * 16 * (int)sizeof(T);
        if (sizeof(T) == 2) {
            load_matrices_transposed(x, from);
            return;
        }
        x[0] = load_word(from), x[3] = load_word(from + ROW + 32);
        x[B ? 1 : 2] = load_word(from + ROW), x[B ? 2 : 1] = load_word(from + 32);
    }
};

/* Operand a of a product, made from d of another product. For BF16 the operand is rounded. */
template <typename T, int M, int N>
struct Weights {
    const float (&w)[M][N][4];

    __device__ void operator()(uint32_t (&x)[4], int i, int k) const
    {
        if constexpr (sizeof(T) == 2) {
            x[0] = bf16_pair(w[i][2 * k][0], w[i][2 * k][1]),
            x[1] = bf16_pair(w[i][2 * k][2], w[i][2 * k][3]);
            x[2] = bf16_pair(w[i][2 * k + 1][0], w[i][2 * k + 1][1]),
            x[3] = bf16_pair(w[i][2 * k + 1][2], w[i][2 * k + 1][3]);
        } else {
            x[0] = __float_as_uint(w[i][k][0]), x[1] = __float_as_uint(w[i][k][2]);
            x[2] = __float_as_uint(w[i][k][1]), x[3] = __float_as_uint(w[i][k][3]);
        }
    }
};

template <typename T>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (sizeof(T) == 2) {
        multiply_bf16(d, a, b0, b1);
    } else {
        uint32_t large[4], small[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            large[i] = round_tf32(__uint_as_float(a[i]));
            small[i] = round_tf32(__uint_as_float(a[i]) - __uint_as_float(large[i]));
        }
        const uint32_t large0 = round_tf32(__uint_as_float(b0)),
                       large1 = round_tf32(__uint_as_float(b1));
        multiply_tf32(d, small, large0, large1);
        multiply_tf32(d, large, round_tf32(__uint_as_float(b0) - __uint_as_float(large0)),
                      round_tf32(__uint_as_float(b1) - __uint_as_float(large1)));
        multiply_tf32(d, large, large0, large1);
    }
}

/* d (16 M, 8 N) += a b, over STEPS steps. */
template <typename T, int STEPS, int M, int N, class A, class B>
__device__ inline void add_product(float (&d)[M][N][4], const A &a, const B &b)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        uint32_t x[M][4], y[4];
#pragma unroll
        for (int m = 0; m < M; m++)
            a(x[m], m, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            b(y, n / 2, k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply<T>(d[m][n], x[m], y[0], y[1]);
                multiply<T>(d[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

/* Stores two neighbouring elements of a row. */
__device__ inline void store_two(bf16 *to, float a, float b)
{
    *reinterpret_cast<uint32_t *>(to) = bf16_pair(a, b);
}
__device__ inline void store_two(float *to, float a, float b)
{
    *reinterpret_cast<float2 *>(to) = make_float2(a, b);
}

/* Starts the copy of a tile of ROWS rows from global memory, where rows are `width` elements apart,
 * by all THREADS threads of the block. Rows after `rows` and columns after `columns`, an even
 * number, become zeros. */
template <typename T, int COLUMNS, int ROWS, int THREADS>
__device__ inline void copy_tile(uint32_t to, const T *from, int width, int rows, int columns)
{
    constexpr int VECTOR = 16 / sizeof(T), WORD = 4 / sizeof(T),
                  ACROSS = COLUMNS == 96 ? 16 : COLUMNS / VECTOR;
    constexpr int DOWN = THREADS / ACROSS;
    const int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * VECTOR;
    to += row * PITCH<T, COLUMNS> + column * (int)sizeof(T);
    from += (int64_t)row * width + column;
    if (column >= COLUMNS)
        return;
    if (columns % VECTOR != 0) {
#pragma unroll 1
        for (int r = row; r < ROWS; r += DOWN, to += DOWN * PITCH<T, COLUMNS>, from += DOWN * width)
            for (int i = 0; i < 4; i++)
                copy_4(to + 4 * i, from + WORD * i, r < rows && column + WORD * i < columns);
        return;
    }
    rows = column < columns ? rows - row : 0;
#pragma unroll
    for (int r = 0; r < ROWS; r += DOWN, to += DOWN * PITCH<T, COLUMNS>, from += DOWN * width)
        if (ROWS % DOWN == 0 || row + r < ROWS)
            copy_16(to, from, r < rows);
}
