/* Definitions that the kernels of attention on compute capability 9.0 share, and the small kernels
 * before and after the two main kernels. attention_sm90_forward.cuh has the main kernel of forward,
 * attention_sm90.cuh has the main kernel of backward. attention_sm90.cu launches all kernels.
 *
 * A document is divided into blocks of 128 keys. Forward divides the document into blocks of 128
 * queries, and backward divides it into tiles of QUERIES queries. Backward accumulates tiles of dq
 * in a workspace, in F32 and in the register layout of wgmma, and converts them to BF16 rows at the
 * end. D is the width of a tile. If heads are narrower, TMA fills the other columns with zeros. */
#pragma once
#include "kernels/cuda/attention.h"
#include "kernels/cuda/hopper.cuh"

static constexpr int MOVERS = 128, CONSUMERS = 256, SM90_THREADS = MOVERS + CONSUMERS;
static constexpr int KEYS = 128;
static constexpr int ROW = 128;      /* bytes of a row of a panel */
static constexpr int PART = 64 * 64; /* floats of dq per warpgroup and tile */

template <int D>
struct Tile {
    static constexpr int QUERIES = D == 128 ? 64 : 128, PER_BLOCK = KEYS / QUERIES, PANELS = D / 64;
    static constexpr int KEY_BYTES = KEYS * D * 2, BYTES = QUERIES * D * 2,
                         DS_BYTES = KEYS * QUERIES * 2;
};

/* What a thread block works on at a time: one block of a document, of one head. head -1: no more
 * work. */
struct Item {
    int start, length, first, block, head;
};

/* Tickets in shared memory, which the first block of a cluster sends to the other blocks. */
struct Tickets {
    int number[4];
    Barrier full[4];
};

/* Arguments of all kernels. */
struct Work {
    int T, H, D, window;     /* window: a number of keys; T if attention has no window */
    int blocks;              /* number of blocks of keys in all documents */
    const Packed *table;     /* the table of Blocks */
    float scale, scale_log2; /* factors of scores. scale_log2 = scale * log2(e), for exp2 */
    int *ticket;             /* number of items taken */
};

/* Arguments of backward. A slot is a tile of queries of one head. Its number is (block *
 * PER_BLOCK + tile of the block) * H + head. */
struct Backward : Work {
    float *rows; /* (slots, 2, QUERIES): lse in base 2, then delta */
    /* (slots, 2, PART): sums before scaling, in the order of threads */
    float *dq;
    int *turn;     /* (slots): number of blocks that have added to the tile */
    bf16 *dk, *dv; /* gradients of every query head, kv_width elements per token */
    int64_t kv_width;
};

__device__ inline Packed document_of(const Work &w, int block)
{
    return document_of(w.table, w.T, KEYS, block);
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Loads a tile of one head, `count` tokens from n on, in boxes of 64 tokens by 64 columns. If the
 * BLOCKS blocks of a cluster need the same tile, each block loads some boxes for all of them. rank:
 * number of this block in the cluster. */
template <int D, int BLOCKS = 1>
__device__ inline void load_tile(char *to, const CUtensorMap *map, int head, int n, int count,
                                 Barrier *b, int rank = 0)
{
    int box = 0;
    for (int panel = 0; panel < Tile<D>::PANELS; panel++)
        for (int i = 0; i < count; i += 64, box++) {
            char *at = to + (panel * count + i) * ROW;
            if (BLOCKS == 1)
                load_box(at, map, 64 * panel, head, n + i, b);
            else if (box % BLOCKS == rank)
                load_box_everywhere(at, map, 64 * panel, head, n + i, b, (1 << BLOCKS) - 1);
        }
}

__device__ inline void init_tickets(Tickets &tickets)
{
    for (int i = 0; i < 4; i++)
        barrier_init(&tickets.full[i], 1);
}

/* Returns the i-th ticket of a cluster, which its first block takes. NOTE: four slots are enough if
 * a block asks for ticket i only when its item i - 3 is done. Then every block has read ticket i -
 * 3, because it has loaded its part of that item. */
template <int BLOCKS>
__device__ inline int next_ticket(Tickets &tickets, int *ticket, int i, int rank)
{
    Barrier *full = &tickets.full[i & 3];
    int *place = &tickets.number[i & 3];
    if (rank > 0) {
        barrier_expect(full, sizeof *place);
        barrier_wait(full, i >> 2 & 1);
        return *place;
    }
    const int number = atomicAdd(ticket, 1);
    for (int block = 1; block < BLOCKS; block++)
        store_at(place, number, full, block);
    return number;
}

/* The warpgroups take turns to start products, by named barriers 1 and 2. */
__device__ inline void take_turn(int group)
{
    named_barrier(1 + group, CONSUMERS);
}
__device__ inline void pass_turn(int group)
{
    named_barrier_arrive(2 - group, CONSUMERS);
}

/* d (64, D) += a (64, 4 W) rows (4 W, D). */
template <int C, int W>
__device__ inline void start_sum(float (&d)[C], uint32_t (&a)[W], uint32_t rows)
{
    keep_in_place(d);
    keep_in_place(a);
    products_fence();
#pragma unroll
    for (int k = 0; k < W / 4; k++)
        product_add(d, a + 4 * k, rows + step_by_columns(k));
    products_commit();
}

#endif

/* Transposes x in four neighbouring lanes: x[i] of lane p moves to x[p] of lane i. Before, x[i] of
 * lane p is pair p of the i-th eight columns. */
__device__ inline void transpose_quad(uint32_t (&x)[4])
{
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = other;
    }
}

/* Returns the sum of the squares of eight BF16. */
__device__ inline float norm_squared(uint4 eight)
{
    const uint32_t word[] = { eight.x, eight.y, eight.z, eight.w };
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float low = __uint_as_float(word[k] << 16),
                    high = __uint_as_float(word[k] & 0xffff0000u);
        sum = fmaf(low, low, fmaf(high, high, sum));
    }
    return sum;
}

/* Stores one row of d, times `factor`, as BF16, up to column `columns`. d[4j] and d[4j+1] hold the
 * upper row of the thread; d[4j+2] and d[4j+3] hold the row `below`. All lanes must call this
 * function, also for rows that do not exist. */
template <int C>
__device__ inline void store_row(bf16 *row, const float (&d)[C], bool below, float factor,
                                 int columns, bool exists)
{
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < C / 4; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = d + 4 * (j + i) + 2 * below;
            x[i] = bf16_pair(two[0] * factor, two[1] * factor);
        }
        transpose_quad(x);
        const int column = 8 * (j + quad);
        if (exists && column < columns)
            *reinterpret_cast<uint4 *>(row + column) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

static constexpr int SIDE_THREADS = 256;

/* ---- before forward: the norms of keys ------------------------------------------------------- */

/* norm (K, blocks): the largest |k| of each head and block. A thread block computes one of these
 * numbers, with 16 lanes per token. k points to the first token of the first head, in rows of
 * `width` elements. */
__global__ void __launch_bounds__(SIDE_THREADS)
    key_norm_kernel(float *norm, const Work w, const bf16 *k, int64_t width)
{
    __shared__ float shared[32];
    const int block = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 16;
    const Packed d = document_of(w, block);
    float most = 0;
#pragma unroll
    for (int i = threadIdx.x / 16; i < KEYS; i += SIDE_THREADS / 16) {
        const int t = (block - d.first) * KEYS + i;
        float sum = 0;
        if (t < d.length && 8 * lane < w.D)
            sum = norm_squared(*reinterpret_cast<const uint4 *>(k + (d.start + t) * width +
                                                                head * w.D + 8 * lane));
#pragma unroll
        for (int o = 8; o > 0; o >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, o);
        most = fmaxf(most, sum);
    }
    most = block_max(most, shared);
    if (threadIdx.x == 0)
        norm[head * gridDim.x + block] = sqrtf(most);
}

/* ---- before backward: lse and delta of queries ----------------------------------------------- */

/* Each thread block computes one block of one head, with 16 lanes per token. Rows after the
 * document's end get lse = inf, so p = exp2(s - inf) = 0. lse (natural logarithm) is (B, H, T), or
 * (N, H) if there is a table. */
template <int D>
__global__ void __launch_bounds__(SIDE_THREADS)
    prepare_kernel(const Backward w, const bf16 *dy, const bf16 *y, const float *lse)
{
    constexpr int QUERIES = Tile<D>::QUERIES;
    const int block = blockIdx.x, h = blockIdx.y, lane = threadIdx.x % 16;
    const Packed d = document_of(w, block);
    const int64_t slot = (int64_t)block * Tile<D>::PER_BLOCK * w.H + h;
    if (threadIdx.x < Tile<D>::PER_BLOCK)
        w.turn[slot + threadIdx.x * w.H] = 0;
    if (block == 0 && h == 0 && threadIdx.x == 0)
        *w.ticket = 0;
#pragma unroll 4
    for (int i = threadIdx.x / 16; i < KEYS; i += SIDE_THREADS / 16) {
        const int t = (block - d.first) * KEYS + i, n = d.start + t;
        float delta = 0;
        if (t < d.length && 8 * lane < w.D) {
            const int64_t at = ((int64_t)n * w.H + h) * w.D + 8 * lane;
            const uint4 a = *reinterpret_cast<const uint4 *>(dy + at),
                        b = *reinterpret_cast<const uint4 *>(y + at);
            const uint32_t as[] = { a.x, a.y, a.z, a.w }, bs[] = { b.x, b.y, b.z, b.w };
#pragma unroll
            for (int k = 0; k < 4; k++)
                delta +=
                    __uint_as_float(as[k] << 16) * __uint_as_float(bs[k] << 16) +
                    __uint_as_float(as[k] & 0xffff0000u) * __uint_as_float(bs[k] & 0xffff0000u);
        }
#pragma unroll
        for (int o = 8; o > 0; o >>= 1)
            delta += __shfl_xor_sync(0xffffffffu, delta, o);
        if (lane == 0) {
            const int64_t at =
                w.table ? (int64_t)n * w.H + h : ((int64_t)(n / w.T) * w.H + h) * w.T + n % w.T;
            float *row = w.rows + (slot + i / QUERIES * w.H) * 2 * QUERIES + i % QUERIES;
            row[0] = t < d.length ? lse[at] * 1.44269504088896341f : INFINITY;
            row[QUERIES] = delta;
        }
    }
}

/* ---- after backward: dqkv from the workspaces ------------------------------------------------ */

/* Each thread block converts one tile of one head, with the thread layout of the warpgroups that
 * computed dq. */
template <int D>
__global__ void __launch_bounds__(SIDE_THREADS)
    finish_dq_kernel(bf16 *dq, int64_t width, const Backward w)
{
    constexpr int QUERIES = Tile<D>::QUERIES;
    const int block = blockIdx.x / Tile<D>::PER_BLOCK, h = blockIdx.y, part = threadIdx.x / 128,
              thread = threadIdx.x % 128;
    const Packed doc = document_of(w, block);
    /* position of the tile's first query in its document */
    const int first = (blockIdx.x - doc.first * Tile<D>::PER_BLOCK) * QUERIES;
    const int t = first + (D == 128 ? 0 : 64 * part) + thread / 32 * 16 + thread % 32 / 4;
    const int left = D == 128 ? 64 * part : 0;
    if (first >= doc.length)
        return; /* no block has stored this tile */
    const float4 *from = reinterpret_cast<const float4 *>(
        w.dq + ((int64_t)blockIdx.x * w.H + h) * 2 * PART + part * PART);
    float d[32];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float4 x = from[j * 128 + thread];
        d[4 * j] = x.x, d[4 * j + 1] = x.y, d[4 * j + 2] = x.z, d[4 * j + 3] = x.w;
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        store_row(dq + (int64_t)(doc.start + t + 8 * r) * width + h * w.D + left, d, r == 1,
                  w.scale, w.D - left, t + 8 * r < doc.length);
}

/* dk and dv of a key/value head are sums over its query heads, in their order. blockIdx.x selects a
 * token of a block of a document. A thread computes eight of the token's 2 K D columns. `heads`
 * holds dk (N, K * group, D), then dv. */
__global__ void __launch_bounds__(SIDE_THREADS)
    sum_heads_kernel(bf16 *dk, int64_t width, const bf16 *heads, int N, int K, int group,
                     const Work w)
{
    const int D = w.D, column = 8 * (blockIdx.y * SIDE_THREADS + threadIdx.x),
              which = column / (K * D), kv = column / D % K;
    const int block = blockIdx.x / KEYS, d = column % D;
    const Packed doc = document_of(w, block);
    const int t = (block - doc.first) * KEYS + blockIdx.x % KEYS;
    if (which > 1 || t >= doc.length)
        return;
    const int64_t n = doc.start + t, numel = (int64_t)N * K * group * D;
    const bf16 *from = heads + which * numel + (n * K + kv) * group * D + d;
    float sum[8] = {};
    for (int g = 0; g < group; g++) {
        const uint4 x = *reinterpret_cast<const uint4 *>(from + (int64_t)g * D);
        const uint32_t word[] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum[2 * k] += __uint_as_float(word[k] << 16);
            sum[2 * k + 1] += __uint_as_float(word[k] & 0xffff0000u);
        }
    }
    *reinterpret_cast<uint4 *>(dk + n * width + column) =
        make_uint4(bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]), bf16_pair(sum[4], sum[5]),
                   bf16_pair(sum[6], sum[7]));
}
