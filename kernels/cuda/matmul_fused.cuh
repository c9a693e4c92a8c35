/* A product of FP8 operands, both by rows, and an operation on its sums in registers, for compute
 * capability 9.0. The BF16 tensor that a GEMM would write and another kernel would read stays on
 * the chip.
 *
 * A tile is 128 tokens by 256 rows of weights. Two thread blocks form a cluster and have tiles of
 * the same weights at the same time. Each block loads its own tokens, and half of the weights for
 * both blocks. Two of a block's three warpgroups have 64 tokens each, with all sums of a tile in
 * registers. The third warpgroup moves data. When a thread's sums of a tile are complete, the
 * thread keeps them in BF16, and computes and stores the results while products of the next tile
 * run.
 *
 * wgmma defines which sums a thread has. TMA tensor maps of five dimensions load rows of operands
 * in a permuted order, so that the sums of a thread are neighbours.
 *
 * Sums use short accumulators, and add 32 terms at a time, in their order, as cuBLASLt does.
 *
 * An End is the operation on the sums:
 *     ACROSS                                  number of columns of its result per tile
 *     PARTS                                   number of parts of finishing a tile; each part overlaps with one or more stages
 *     TOKENS                                  the format of tokens; weights are E4M3
 *     Job : FusedJob, Staging                 arguments and shared memory of the operation
 *     int  weights(job, column, part)         coordinate of half a tile's weights in their map
 *     bool done(job)                          returns true if there is nothing to do
 *     void init(staging)                      called by one thread
 *     End(job, staging, group)                one per warpgroup
 *     void expect(at)                         gets the position of the next sums; called after the last part of the held sums
 *     void finish(held, part)                 finishes a part of the held sums, part by part in order; before the first
 *                                             expect() no sums are held, and finish does nothing
 *     void end()                              after the last part
 *     void carry(staging, job, maps, at, group)       called by another thread for each tile: stores the results in `staging` */
#pragma once
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tiles.cuh"

/* FUSED_DEPTH: terms of the sums per stage */
constexpr int FUSED_TOKENS = 128, FUSED_WEIGHTS = 256, FUSED_DEPTH = 128;
constexpr int FUSED_PAIR = 2, FUSED_STAGES = 4, FUSED_CONSUMERS = 256,
              FUSED_THREADS = FUSED_CONSUMERS + 128;

/* A job has N tokens, F columns of the result, and sums of C terms. scale_x and scale_w are the
 * operands' scales. */
struct FusedJob {
    int N, F, C;
    const float *scale_x, *scale_w;
};

/* Tensor maps of tokens and weights, and of the results that TMA writes. */
struct FusedMaps {
    CUtensorMap x, w, out[2];
};

struct FusedStage {
    uint8_t x[FUSED_TOKENS * FUSED_DEPTH], w[FUSED_WEIGHTS * FUSED_DEPTH];
};

/* Readers wait for the "full" barrier, the next writer waits for the "empty" barrier. Readers of
 * both blocks arrive at "empty" in both blocks. */
template <class Staging>
struct alignas(1024) FusedShared {
    FusedStage stage[FUSED_STAGES];
    Staging staging;
    Barrier full[FUSED_STAGES], empty[FUSED_STAGES];
};

/* The first column, and the first token, of the tiles of both blocks, or of a warpgroup's tile. */
struct TileOrigin {
    int token, column;
};

__host__ __device__ inline int fused_pairs(const FusedJob &job)
{
    return (job.N + FUSED_PAIR * FUSED_TOKENS - 1) / (FUSED_PAIR * FUSED_TOKENS);
}

/* Returns the number of stages (FUSED_DEPTH terms each) in which a tile's sums of C terms are
 * computed. */
__host__ __device__ inline int fused_stages(int C)
{
    return (C + FUSED_DEPTH - 1) / FUSED_DEPTH;
}

template <class End>
__host__ __device__ inline int fused_tiles(const FusedJob &job)
{
    return fused_pairs(job) * (job.F / End::ACROSS);
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int FUSED_SUMS = 64 * FUSED_WEIGHTS / 128; /* number of sums of a tile per thread */
/* number of pairs of tiles of tokens that loop over all columns together and stay in the L2
 * cache */
constexpr int TOGETHER = 8;

template <class End>
__device__ inline TileOrigin tile_origin(const FusedJob &job, int tile)
{
    const int across = job.F / End::ACROSS, first = tile / (TOGETHER * across) * TOGETHER;
    const int count = min(TOGETHER, fused_pairs(job) - first), i = tile - first * across;
    return { (first + i % count) * FUSED_PAIR * FUSED_TOKENS, i / count * End::ACROSS };
}

/* Returns the position of one warpgroup's tile. */
__device__ inline TileOrigin warpgroup_origin(TileOrigin at, int rank, int group)
{
    return { at.token + rank * FUSED_TOKENS + 64 * group, at.column };
}

/* Called by one thread. Loads tokens and weights. rank: number of this block in the cluster. */
template <class End>
__device__ void load(FusedShared<typename End::Staging> &s, const typename End::Job &job,
                     const FusedMaps &maps, int rank)
{
    constexpr int HALF = FUSED_WEIGHTS / FUSED_PAIR;
    Ring<FUSED_STAGES> ring;
    for (int tile = blockIdx.x / FUSED_PAIR; tile < fused_tiles<End>(job);
         tile += gridDim.x / FUSED_PAIR) {
        const TileOrigin at = tile_origin<End>(job, tile);
        const int weights = End::weights(job, at.column, rank),
                  tokens = at.token + rank * FUSED_TOKENS;
        for (int k = 0; k < job.C; k += FUSED_DEPTH) {
            const Ring<FUSED_STAGES> to = ring.take();
            FusedStage &stage = s.stage[to.stage];
            Barrier *full = &s.full[to.stage];
            barrier_wait(&s.empty[to.stage], to.parity ^ 1);
            barrier_expect(full, sizeof stage);
            load_box(stage.x, &maps.x, k, tokens / 16, full);
            load_box_everywhere(stage.w + rank * HALF * FUSED_DEPTH, &maps.w, k, weights, full,
                                (1 << FUSED_PAIR) - 1);
        }
    }
}

/* Called by one thread per warpgroup. Calls End::carry for each tile. */
template <class End>
__device__ void carry(FusedShared<typename End::Staging> &s, const typename End::Job &job,
                      const FusedMaps &maps, int rank, int group)
{
    for (int tile = blockIdx.x / FUSED_PAIR; tile < fused_tiles<End>(job);
         tile += gridDim.x / FUSED_PAIR)
        End::carry(s.staging, job, maps, warpgroup_origin(tile_origin<End>(job, tile), rank, group),
                   group);
    copies_wait();
}

/* Starts the products of the terms of the next stage. */
template <class End>
__device__ inline void start_products(float (&sum)[FUSED_SUMS],
                                      FusedShared<typename End::Staging> &s,
                                      Ring<FUSED_STAGES> &ring, int group, bool add)
{
    const Ring<FUSED_STAGES> at = ring.take();
    const uint32_t x = operand(s.stage[at.stage].x + group * 64 * FUSED_DEPTH, 0),
                   w = operand(s.stage[at.stage].w, 0);
    barrier_wait(&s.full[at.stage], at.parity);
    products_fence();
#pragma unroll
    for (int j = 0; j < FUSED_DEPTH; j += 32)
        product_fp8<End::TOKENS>(sum, x + operand_step(j), w + operand_step(j), add || j > 0);
    products_commit();
}

/* A thread's sums of a tile in BF16, two columns per word, in wgmma's order: for column pair j the
 * upper token, then the lower token. */
struct Held {
    uint32_t pair[FUSED_SUMS / 2];
};

__device__ inline void hold(Held &held, const float (&sum)[FUSED_SUMS], float scale)
{
#pragma unroll
    for (int i = 0; i < FUSED_SUMS / 2; i++) {
        const __nv_bfloat162 two =
            __floats2bfloat162_rn(sum[2 * i] * scale, sum[2 * i + 1] * scale);
        held.pair[i] = *(const uint32_t *)&two;
    }
}

/* Unpacks N columns of the upper token, from pair `first` on, or of the lower token if `first` is
 * odd. */
template <int N>
__device__ inline void unpack(float (&v)[N], const Held &held, int first)
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const uint32_t two = held.pair[first + 2 * k];
        v[2 * k] = __uint_as_float(two << 16);
        v[2 * k + 1] = __uint_as_float(two & 0xffff0000u);
    }
}

/* The loop of one warpgroup. The loop finishes a tile part by part while products of the next tile
 * run. NOTE: the tensor cores have a short queue, so parts should be short: parts of 150
 * instructions are faster than parts of 290. */
template <class End>
__device__ void consume(FusedShared<typename End::Staging> &s, const typename End::Job &job,
                        int rank)
{
    const int group = uniform(threadIdx.x / 128), stages = fused_stages(job.C),
              each = (stages - 1) / (End::PARTS - 1);
    const float scale = *job.scale_x * *job.scale_w;
    float sum[FUSED_SUMS];
    End end(job, s.staging, group);
    Held held = {};
    Ring<FUSED_STAGES> ring, read;
    const auto release = [&] {
        barrier_arrive_everywhere<FUSED_PAIR>(&s.empty[read.take().stage]);
    };
    const auto next_products = [&] {
        start_products<End>(sum, s, ring, group, true);
        products_wait<1>();
        release();
    };
    for (int tile = blockIdx.x / FUSED_PAIR; tile < fused_tiles<End>(job);
         tile += gridDim.x / FUSED_PAIR) {
        start_products<End>(sum, s, ring, group, false);
        end.finish(held, 0);
#pragma unroll
        for (int part = 1; part < End::PARTS; part++) {
            for (int i = 0; i < each; i++)
                next_products();
            end.finish(held, part);
        }
        end.expect(warpgroup_origin(tile_origin<End>(job, tile), rank, group));
        for (int i = 1 + each * (End::PARTS - 1); i < stages; i++)
            next_products();
        products_wait<0>();
        release();
        keep_in_place(sum);
        hold(held, sum, scale);
    }
#pragma unroll
    for (int part = 0; part < End::PARTS; part++)
        end.finish(held, part);
    end.end();
}

#endif

template <class End>
__global__ void __launch_bounds__(FUSED_THREADS, 1)
    matmul_fused_kernel(const __grid_constant__ typename End::Job job,
                        const __grid_constant__ FusedMaps maps)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    typedef FusedShared<typename End::Staging> Shared;
    Shared &s = *reinterpret_cast<Shared *>(memory + (-shared_address(memory) & 1023));
    const int rank = blockIdx.x % FUSED_PAIR;
    if (End::done(job))
        return;
    if (threadIdx.x == 0) {
        prefetch_map(&maps.x);
        prefetch_map(&maps.w);
        for (int i = 0; i < FUSED_STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], FUSED_PAIR * FUSED_CONSUMERS / 32);
        }
        End::init(s.staging);
        barrier_init_fence();
    }
    cluster_barrier<FUSED_PAIR>();
    if (threadIdx.x >= FUSED_CONSUMERS) {
        registers_shrink<24>();
        const int warp = threadIdx.x / 32 - FUSED_CONSUMERS / 32;
        if (threadIdx.x % 32 == 0 && warp == 0)
            load<End>(s, job, maps, rank);
        if (threadIdx.x % 32 == 0 && (warp == 1 || warp == 2))
            carry<End>(s, job, maps, rank, warp - 1);
    } else {
        registers_grow<240>();
        consume<End>(s, job, rank);
    }
    cluster_end<FUSED_PAIR>();
#endif
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* The order of each `rows` rows in shared memory. Row i step[0] + j step[1] + k step[2] has
 * position i + j count[0] + k count[0] count[1], where i < count[0], j < count[1], k < count[2]. */
struct RowOrder {
    int rows, count[3], step[3];
};

/* Makes a TMA tensor map of the rows of a matrix of bytes, with boxes of `width` bytes by box_rows
 * rows. The first coordinate counts bytes; the last one counts blocks of order.rows rows. NOTE:
 * cuTensorMapEncodeTiled's documentation shows only increasing strides, but drivers accept other
 * strides too. Returns false if a driver does not: the caller then runs the GEMM and the operation
 * after the GEMM separately. */
inline bool fused_map(CUtensorMap *map, void *data, int rows, int cols, RowOrder order,
                      int box_rows, int width)
{
    const cuuint64_t row = (cuuint64_t)cols;
    cuuint64_t sizes[5] = { row }, strides[4];
    cuuint32_t box[5] = { (cuuint32_t)width };
    for (int i = 0; i < 3; i++) {
        sizes[i + 1] = (cuuint64_t)order.count[i];
        box[i + 1] = (cuuint32_t)order.count[i];
        strides[i] = (cuuint64_t)order.step[i] * row;
    }
    sizes[4] = (cuuint64_t)(rows / order.rows);
    strides[3] = (cuuint64_t)order.rows * row;
    box[4] = (cuuint32_t)(box_rows / order.rows);
    return tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, data, sizes, strides, box);
}

template <class End>
void launch_fused(const typename End::Job &job, const FusedMaps &maps)
{
    const int tiles = fused_tiles<End>(job), most = device_sm_count() / FUSED_PAIR;
    launch_clusters(matmul_fused_kernel<End>, tiles < most ? tiles : most, FUSED_PAIR,
                    FUSED_THREADS, sizeof(FusedShared<typename End::Staging>) + 1024, job, maps);
    LAUNCH_CHECK();
}

/* x (N,C); F: columns of the result. */
inline FusedJob fused_job(Tensor x, Tensor w, int F)
{
    return { x.rows, F, x.cols, (const float *)x.scale, (const float *)w.scale };
}

/* Returns true if t is an operand with one scale, and TMA can read or write its rows or columns in
 * `data`. */
inline bool is_fusable(const void *data, Tensor t, DType dtype)
{
    return t.format.dtype == dtype && t.format.group == 0 && data && (uintptr_t)data % 16 == 0;
}

/* Returns true if a tile's sums of C terms have enough stages to overlap with finishing the
 * previous tile. */
template <class End>
inline bool is_deep_enough(int C)
{
    return C % 16 == 0 && fused_stages(C) >= End::PARTS;
}
