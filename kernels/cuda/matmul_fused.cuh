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
 * A Work, in shared memory, says which tiles there are:
 *     Job                                     a FusedJob, and what else the Work needs
 *     DEEP                                    sums have at least as many stages as parts
 *     void start(job)                         called by all threads
 *     int  most<ACROSS>(job)                  number of pairs of tiles, or more; on the host
 *     int  tiles<ACROSS>(job)                 number of pairs of tiles
 *     FusedTile tile<ACROSS>(job, i, rank)    this block's tile of the i-th pair
 *     int  rows(job)                          the token after the last one
 *
 * An End is the operation on the sums:
 *     Work                                    as above
 *     ACROSS                                  number of columns of its result per tile
 *     PARTS                                   number of parts of finishing a tile; each part overlaps with one or more stages
 *     TOKENS                                  the format of tokens; weights are E4M3
 *     Job : Work::Job, Staging                arguments and shared memory of the operation
 *     int  weights(job, at, part)             coordinate of half a tile's weights in their map
 *     bool done(job)                          returns true if there is nothing to do
 *     void init(staging)                      called by one thread
 *     End(job, staging, group, rows)          one per warpgroup
 *     void expect(at)                         gets the warpgroup's tile of the next sums; called after the last part of the held
 *                                             sums
 *     void finish(held, part)                 finishes a part of the held sums, part by part in order; before the first
 *                                             expect() no sums are held, and finish does nothing
 *     void end()                              after the last part
 *     void carry(staging, job, maps, at, group, rows) called by another thread for each tile: stores the results in `staging` */
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
template <class End>
struct alignas(1024) FusedShared {
    FusedStage stage[FUSED_STAGES];
    typename End::Staging staging;
    Barrier full[FUSED_STAGES], empty[FUSED_STAGES];
    typename End::Work work;
};

/* The tile of a block or of a warpgroup. */
struct FusedTile {
    int token, column; /* the first ones */
    int begin, end;    /* terms of the sums */
    int matrix;        /* number of the matrix of weights, and of its scale */
    int row;           /* row of the result that belongs to token 0 */
    bool paired;       /* the blocks have the same weights */
};

__host__ __device__ inline int fused_pairs(int tokens)
{
    return (tokens + FUSED_PAIR * FUSED_TOKENS - 1) / (FUSED_PAIR * FUSED_TOKENS);
}

/* Returns the number of stages (FUSED_DEPTH terms each) in which a tile's sums of C terms are
 * computed. */
__host__ __device__ inline int fused_stages(int C)
{
    return (C + FUSED_DEPTH - 1) / FUSED_DEPTH;
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int FUSED_SUMS = 64 * FUSED_WEIGHTS / 128; /* number of sums of a tile per thread */
/* number of pairs of tiles of tokens that loop over all columns together and stay in the L2
 * cache */
constexpr int TOGETHER = 8;

/* Returns tile number i of all pairs of tiles of `tokens` tokens. */
template <int ACROSS>
__device__ inline FusedTile fused_tile(const FusedJob &job, int tokens, int i, int rank)
{
    const int across = job.F / ACROSS, first = i / (TOGETHER * across) * TOGETHER;
    const int count = min(TOGETHER, fused_pairs(tokens) - first);
    i -= first * across;
    return { ((first + i % count) * FUSED_PAIR + rank) * FUSED_TOKENS,
             i / count * ACROSS,
             0,
             job.C,
             0,
             0,
             true };
}

__device__ inline FusedTile warpgroup_tile(FusedTile at, int group)
{
    at.token += 64 * group;
    return at;
}

/* Calls f(tile) for all tiles of this block. */
template <class End, class F>
__device__ inline void each_fused_tile(const FusedShared<End> &s, const typename End::Job &job, F f)
{
    const int rank = blockIdx.x % FUSED_PAIR;
    for (int i = blockIdx.x / FUSED_PAIR; i < s.work.template tiles<End::ACROSS>(job);
         i += gridDim.x / FUSED_PAIR)
        f(s.work.template tile<End::ACROSS>(job, i, rank));
}

/* Called by one thread. Loads tokens and weights. */
template <class End>
__device__ void load(FusedShared<End> &s, const typename End::Job &job, const FusedMaps &maps)
{
    constexpr int HALF = FUSED_WEIGHTS / FUSED_PAIR;
    const int rank = blockIdx.x % FUSED_PAIR;
    Ring<FUSED_STAGES> ring;
    each_fused_tile(s, job, [&](FusedTile at) {
        const int first = End::weights(job, at, 0), second = End::weights(job, at, 1);
        for (int k = at.begin; k < at.end; k += FUSED_DEPTH) {
            const Ring<FUSED_STAGES> to = ring.take();
            FusedStage &stage = s.stage[to.stage];
            Barrier *full = &s.full[to.stage];
            barrier_wait(&s.empty[to.stage], to.parity ^ 1);
            barrier_expect(full, sizeof stage);
            load_box(stage.x, &maps.x, k, at.token / 16, full);
            if (at.paired)
                load_box_everywhere(stage.w + rank * HALF * FUSED_DEPTH, &maps.w, k,
                                    rank == 0 ? first : second, full, (1 << FUSED_PAIR) - 1);
            else {
                load_box(stage.w, &maps.w, k, first, full);
                load_box(stage.w + HALF * FUSED_DEPTH, &maps.w, k, second, full);
            }
        }
    });
}

/* Called by one thread per warpgroup. Calls End::carry for each tile. */
template <class End>
__device__ void carry(FusedShared<End> &s, const typename End::Job &job, const FusedMaps &maps,
                      int group)
{
    const int rows = s.work.rows(job);
    each_fused_tile(s, job, [&](FusedTile at) {
        End::carry(s.staging, job, maps, warpgroup_tile(at, group), group, rows);
    });
    copies_wait();
}

/* Starts the products of the terms of the next stage. */
template <class End>
__device__ inline void start_products(float (&sum)[FUSED_SUMS], FusedShared<End> &s,
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
 * run. If there are fewer stages than parts, several parts overlap with one stage. NOTE: the tensor
 * cores have a short queue, so parts should be short: parts of 150 instructions are faster than
 * parts of 290. */
template <class End>
__device__ void consume(FusedShared<End> &s, const typename End::Job &job)
{
    const int group = uniform(threadIdx.x / 128);
    float sum[FUSED_SUMS];
    End end(job, s.staging, group, s.work.rows(job));
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
    const auto tile = [&](int i) {
        return s.work.template tile<End::ACROSS>(job, i, blockIdx.x % FUSED_PAIR);
    };
    for (int i = blockIdx.x / FUSED_PAIR; i < s.work.template tiles<End::ACROSS>(job);
         i += gridDim.x / FUSED_PAIR) {
        const FusedTile terms = tile(i);
        const int stages = fused_stages(terms.end - terms.begin),
                  each = (stages - 1) / (End::PARTS - 1);
        int stage = 1;
        start_products<End>(sum, s, ring, group, false);
        end.finish(held, 0);
#pragma unroll
        for (int part = 1; part < End::PARTS; part++) {
            if (End::Work::DEEP)
                for (int k = 0; k < each; k++)
                    next_products();
            else
                for (; stage <= (stages - 1) * part / End::PARTS; stage++)
                    next_products();
            end.finish(held, part);
        }
        /* NOTE: the tile is computed again, because a register that keeps it would be spilled */
        const FusedTile at = tile(i);
        end.expect(warpgroup_tile(at, group));
        const float scale = *job.scale_x * job.scale_w[SCALE_FLOATS * at.matrix];
        for (int k = End::Work::DEEP ? 1 + each * (End::PARTS - 1) : stage; k < stages; k++)
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
    FusedShared<End> &s =
        *reinterpret_cast<FusedShared<End> *>(memory + (-shared_address(memory) & 1023));
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
    s.work.start(job);
    cluster_barrier<FUSED_PAIR>();
    if (threadIdx.x >= FUSED_CONSUMERS) {
        registers_shrink<24>();
        const int warp = threadIdx.x / 32 - FUSED_CONSUMERS / 32;
        if (threadIdx.x % 32 == 0 && warp == 0)
            load<End>(s, job, maps);
        if (threadIdx.x % 32 == 0 && (warp == 1 || warp == 2))
            carry<End>(s, job, maps, warp - 1);
    } else {
        registers_grow<240>();
        consume<End>(s, job);
    }
    cluster_end<FUSED_PAIR>();
#endif
}

/* One matrix for all tokens. */
struct OneMatrix {
    typedef FusedJob Job;
    static constexpr bool DEEP = true; /* is_deep_enough */

    template <int ACROSS>
    static int most(const Job &job)
    {
        return fused_pairs(job.N) * (job.F / ACROSS);
    }

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __device__ void start(const Job &)
    {
    }
    __device__ int rows(const Job &job) const
    {
        return job.N;
    }
    template <int ACROSS>
    __device__ int tiles(const Job &job) const
    {
        return fused_pairs(job.N) * (job.F / ACROSS);
    }
    template <int ACROSS>
    __device__ FusedTile tile(const Job &job, int i, int rank) const
    {
        return fused_tile<ACROSS>(job, job.N, i, rank);
    }
#endif
};

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
    const int tiles = End::Work::template most<End::ACROSS>(job),
              most = device_sm_count() / FUSED_PAIR;
    launch_clusters(matmul_fused_kernel<End>, tiles < most ? tiles : most, FUSED_PAIR,
                    FUSED_THREADS, sizeof(FusedShared<End>) + 1024, job, maps);
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
