/* Grouped GEMMs for compute capability 9.0.
 *
 * A tile is 128 rows by WIDTH columns of one expert. Two thread blocks form a cluster and have tiles
 * below each other, with the same columns. If both tiles are of the same expert, each block loads
 * its own rows of a, and half of b for both blocks; else each block loads all of its b. Two of a
 * block's three warpgroups have 64 rows each; the third one loads. Blocks loop over tiles. A block
 * finds the expert of a tile in its copy of Routing.first, so the host does not wait for it.
 *
 * A stage has 128 bytes of each row: 128 terms in FP8, 64 in BF16. FP8 operands are read by rows;
 * BF16 operands by columns where the operation sums over their rows (hopper.cuh).
 *
 * PRECISE: the tensor cores' short accumulators sum the 128 terms of a stage; registers sum the
 * stages, in F32. This takes twice the registers, so tiles are half as wide. */
#include "kernels/cuda/experts_gemm.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"

namespace
{

constexpr int TILE_ROWS = 128, PAIR = 2, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int ROW_BYTES = 128; /* bytes of a row in a stage */

struct Job {
    GroupedKind kind;
    /* number of rows of an expert's dw; number of terms of a sum, except for dw */
    int rows, cols, terms;
    int experts;
    const int *first;
    const float *scale_a, *scale_b; /* NULL: the scale is 1 */
    AnyOut out;
    bool adds; /* adds: adds to out */
};

struct Maps {
    CUtensorMap a, b;
};

template <int WIDTH>
struct Stage {
    uint8_t a[TILE_ROWS * ROW_BYTES], b[WIDTH * ROW_BYTES];
};

template <int WIDTH>
constexpr int STAGES = WIDTH == 256 ? 4 : 6;

/* Readers wait for the "full" barrier, the next writer waits for the "empty" barrier. Readers of
 * both blocks arrive at "empty" in both blocks. */
template <int WIDTH>
struct alignas(1024) Shared {
    Stage<WIDTH> stage[STAGES<WIDTH>];
    Barrier full[STAGES<WIDTH>], empty[STAGES<WIDTH>];
    int first[MOST_EXPERTS + 1];
};

/* The tile of one block, and the terms begin .. end - 1 of its sums. paired: the other block's tile
 * belongs to the same expert. */
struct Tile {
    int expert, row, col, begin, end;
    bool paired;
};

__host__ __device__ inline int up(int n, int by)
{
    return (n + by - 1) / by;
}

/* Returns the number of pairs of tiles. rows: number of rows of out, or of an expert's dw. */
template <int WIDTH>
__host__ __device__ inline int pairs_of(const Job &job, int rows)
{
    return up(rows, PAIR * TILE_ROWS) * up(job.cols, WIDTH) *
           (job.kind == GROUPED_DW ? job.experts : 1);
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int PANEL = 64 * ROW_BYTES, TOGETHER = 8;

/* The order of tiles of `out`. TOGETHER pairs process all columns together, so their rows stay in
 * the L2 cache. */
template <int WIDTH>
__device__ Tile tile_of_rows(const Job &job, const int *first, int pair, int rank)
{
    const int rows = first[job.experts], all = up(rows, PAIR * TILE_ROWS),
              across = up(job.cols, WIDTH), begin = pair / (TOGETHER * across) * TOGETHER;
    const int count = min(TOGETHER, all - begin), i = pair - begin * across;
    const int row = (begin + i % count) * PAIR * TILE_ROWS, below = row + TILE_ROWS;
    const int upper = expert_of(first, job.experts, row),
              lower = expert_of(first, job.experts, min(below, rows - 1));
    return { rank == 0 ? upper : lower,
             rank == 0 ? row : below,
             i / count * WIDTH,
             0,
             job.terms,
             upper == lower };
}

template <int WIDTH>
__device__ Tile tile_of_dw(const Job &job, const int *first, int pair, int rank)
{
    const int down = up(job.rows, PAIR * TILE_ROWS), each = down * up(job.cols, WIDTH),
              expert = pair / each, i = pair % each;
    return { expert,
             (i % down * PAIR + rank) * TILE_ROWS,
             i / down * WIDTH,
             first[expert],
             first[expert + 1],
             true };
}

/* Calls f(tile) for all tiles of this block. */
template <int WIDTH, class F>
__device__ inline void each_tile(const Job &job, const int *first, F f)
{
    const int rank = blockIdx.x % PAIR,
              pairs = pairs_of<WIDTH>(job, job.kind == GROUPED_DW ? job.rows : first[job.experts]);
    for (int pair = blockIdx.x / PAIR; pair < pairs; pair += gridDim.x / PAIR)
        f(job.kind == GROUPED_DW ? tile_of_dw<WIDTH>(job, first, pair, rank)
                                 : tile_of_rows<WIDTH>(job, first, pair, rank));
}

/* ---- load ------------------------------------------------------------------------------------ */

/* The coordinates of b's box: k along the sum, `row` along the columns of out. */
template <bool COLUMNS>
__device__ inline void load_b(uint8_t *to, const CUtensorMap *map, int k, int row, int z,
                              Barrier *full, bool everywhere)
{
    const int x = COLUMNS ? row : k, y = COLUMNS ? k : row;
    if (everywhere)
        load_box_everywhere(to, map, x, y, z, full, (1 << PAIR) - 1);
    else
        load_box(to, map, x, y, z, full);
}

/* Called by one thread: loads the stages of all tiles. */
template <DType A, bool A_COLUMNS, bool B_COLUMNS, int WIDTH>
__device__ void load(Shared<WIDTH> &s, const Job &job, const Maps &maps)
{
    constexpr int DEPTH = A == BF16 ? 64 : 128, BOX = B_COLUMNS ? 64 : WIDTH / PAIR;
    const int rank = blockIdx.x % PAIR;
    Ring<STAGES<WIDTH>> ring;
    each_tile<WIDTH>(job, s.first, [&](Tile tile) {
        const int z = job.kind == GROUPED_DW ? 0 : tile.expert;
        const int first = tile.paired ? rank * (WIDTH / PAIR) : 0,
                  last = tile.paired ? first + WIDTH / PAIR : WIDTH;
        for (int k = tile.begin; k < tile.end; k += DEPTH) {
            const Ring<STAGES<WIDTH>> to = ring.take();
            Stage<WIDTH> &stage = s.stage[to.stage];
            Barrier *full = &s.full[to.stage];
            barrier_wait(&s.empty[to.stage], to.parity ^ 1);
            barrier_expect(full, sizeof stage);
            if (A_COLUMNS)
                for (int i = 0; i < TILE_ROWS; i += 64)
                    load_box(stage.a + i * ROW_BYTES, &maps.a, tile.row + i, k, 0, full);
            else
                load_box(stage.a, &maps.a, k, tile.row, 0, full);
            for (int i = first; i < last; i += BOX)
                load_b<B_COLUMNS>(stage.b + i * ROW_BYTES, &maps.b, k, tile.col + i, z, full,
                                  tile.paired);
        }
    });
}

/* ---- products -------------------------------------------------------------------------------- */

/* Starts the products of a stage. add: whether the first of these products adds to the sums. */
template <DType A, bool A_COLUMNS, bool B_COLUMNS, int WIDTH, int N>
__device__ inline void start_products(float (&sum)[N], const Stage<WIDTH> &stage, int group,
                                      bool add)
{
    const uint32_t a = operand(stage.a + group * PANEL, PANEL), b = operand(stage.b, PANEL);
    products_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t a_step = A_COLUMNS ? step_by_columns(j) : operand_step(32 * j),
                       b_step = B_COLUMNS ? step_by_columns(j) : operand_step(32 * j);
        if constexpr (A == BF16)
            product<A_COLUMNS, B_COLUMNS>(sum, a + a_step, b + b_step, add || j > 0);
        else
            product_fp8<A>(sum, a + a_step, b + b_step, add || j > 0);
    }
    products_commit();
}

/* ---- store ----------------------------------------------------------------------------------- */

/* Four neighbouring lanes exchange words: word i of lane j goes to word j of lane i. */
template <int EACH>
__device__ inline void transpose_quad(uint32_t (&x)[4][EACH])
{
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & step))
#pragma unroll
                for (int k = 0; k < EACH; k++) {
                    uint32_t &low = x[i][k], &high = x[i + step][k];
                    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
                    if (upper)
                        low = other;
                    else
                        high = other;
                }
    }
}

/* Stores eight neighbours of a row in BF16. In wgmma's layout, a thread has a word of each of four
 * blocks of eight columns; after the exchange it has all four words of one block. */
__device__ inline void store_words(bf16 *to, const float *sum, float scale, bool inside)
{
    uint32_t x[4][1];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i][0] = bf16_pair(sum[4 * i] * scale, sum[4 * i + 1] * scale);
    transpose_quad(x);
    if (inside)
        *(uint4 *)to = make_uint4(x[0][0], x[1][0], x[2][0], x[3][0]);
}

/* The same in F32 or BF16. Adds to the old values if `adds`. */
__device__ inline void store_floats(AnyOut out, bool adds, size_t at, const float *sum, float scale,
                                    bool inside)
{
    uint32_t x[4][2];
    float v[8], old[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i / 2][i % 2] = __float_as_uint(sum[i / 2 * 4 + i % 2] * scale);
    if (adds && inside)
        load_any(old, AnyIn{ out.data, out.is_f32 }, at, 8);
    transpose_quad(x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = __uint_as_float(x[i / 2][i % 2]) + old[i];
    if (inside)
        store_any(out, at, v, 8);
}

/* Stores the sums of a warpgroup. end: the row after the last row of out, or of an expert's dw. */
template <int N>
__device__ inline void store_sums(const Job &job, const Tile &tile, const float (&sum)[N],
                                  int group, int end)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float scale = (job.scale_a ? *job.scale_a : 1.0f) *
                        (!job.scale_b             ? 1.0f
                         : job.kind == GROUPED_DW ? *job.scale_b
                                                  : job.scale_b[SCALE_FLOATS * tile.expert]);
    const size_t part = job.kind == GROUPED_DW ? (size_t)tile.expert * job.rows : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile.row + 64 * group + 16 * warp + lane / 4 + 8 * half;
        const size_t at = (part + row) * job.cols;
#pragma unroll
        for (int j = 0; j < N / 16; j++) {
            const int col = tile.col + 32 * j + 8 * (lane % 4);
            const bool inside = row < end && col < job.cols;
            if (job.adds || job.out.is_f32)
                store_floats(job.out, job.adds, at + col, &sum[16 * j + 2 * half], scale, inside);
            else
                store_words((bf16 *)job.out.data + at + col, &sum[16 * j + 2 * half], scale,
                            inside);
        }
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

/* The loop of one warpgroup over its tiles. */
template <DType A, bool A_COLUMNS, bool B_COLUMNS, int WIDTH, bool PRECISE>
__device__ void consume(Shared<WIDTH> &s, const Job &job)
{
    const int group = uniform(threadIdx.x / 128),
              end = job.kind == GROUPED_DW ? job.rows : s.first[job.experts];
    constexpr int DEPTH = A == BF16 ? 64 : 128;
    Ring<STAGES<WIDTH>> ring, read;
    const auto release = [&] { barrier_arrive_everywhere<PAIR>(&s.empty[read.take().stage]); };
    each_tile<WIDTH>(job, s.first, [&](Tile tile) {
        float sum[WIDTH / 2] = {}, total[PRECISE ? WIDTH / 2 : 1] = {};
        for (int k = tile.begin; k < tile.end; k += DEPTH) {
            const Ring<STAGES<WIDTH>> at = ring.take();
            barrier_wait(&s.full[at.stage], at.parity);
            start_products<A, A_COLUMNS, B_COLUMNS>(sum, s.stage[at.stage], group, !PRECISE);
            if constexpr (PRECISE) {
                products_wait<0>();
                release();
                keep_in_place(sum);
#pragma unroll
                for (int i = 0; i < WIDTH / 2; i++)
                    total[i] += sum[i];
            } else {
                products_wait<1>();
                if (k > tile.begin)
                    release();
            }
        }
        if constexpr (PRECISE) {
            store_sums(job, tile, total, group, end);
        } else {
            products_wait<0>();
            if (tile.begin < tile.end)
                release();
            keep_in_place(sum);
            store_sums(job, tile, sum, group, end);
        }
    });
}

#endif

template <DType A, bool A_COLUMNS, bool B_COLUMNS, int WIDTH, bool PRECISE>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_sm90_kernel(const __grid_constant__ Job job, const __grid_constant__ Maps maps)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    Shared<WIDTH> &s =
        *reinterpret_cast<Shared<WIDTH> *>(memory + (-shared_address(memory) & 1023));
    if (threadIdx.x == 0) {
        prefetch_map(&maps.a);
        prefetch_map(&maps.b);
        for (int i = 0; i < STAGES<WIDTH>; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], PAIR * CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    for (int e = threadIdx.x; e <= job.experts; e += THREADS)
        s.first[e] = job.first[e];
    cluster_barrier<PAIR>();
    if (threadIdx.x >= CONSUMERS) {
        registers_shrink<40>();
        if (threadIdx.x == CONSUMERS)
            load<A, A_COLUMNS, B_COLUMNS>(s, job, maps);
    } else {
        registers_grow<232>();
        consume<A, A_COLUMNS, B_COLUMNS, WIDTH, PRECISE>(s, job);
    }
    cluster_end<PAIR>();
#endif
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* Makes a map of `count` matrices (rows, cols) in boxes of 128 bytes by box_rows rows. */
bool make_map(CUtensorMap *map, DType dtype, void *data, int count, int rows, int cols,
              int box_rows)
{
    const cuuint64_t size = dtype == BF16 ? 2 : 1, row = (cuuint64_t)cols * size,
                     sizes[] = { (cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)count },
                     strides[] = { row, row * (cuuint64_t)rows };
    const cuuint32_t box[] = { (cuuint32_t)(ROW_BYTES / size), (cuuint32_t)box_rows, 1 };
    return data && (uintptr_t)data % 16 == 0 && row % 16 == 0 &&
           tensor_map(map,
                      dtype == BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                    : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                      3, data, sizes, strides, box);
}

/* Makes the map of an operand of `count` matrices (rows, cols). rows_of_out: rows of a box of an
 * operand that is read by rows. The sum runs along the rows, or along the columns if `columns`. */
bool operand_map(CUtensorMap *map, Tensor t, int count, bool columns, int rows_of_out)
{
    const int rows = t.rows / count;
    if (t.format.dtype == BF16)
        return make_map(map, BF16, t.data, count, rows, t.cols, columns ? 64 : rows_of_out);
    return columns ? make_map(map, t.format.dtype, t.data_t, count, t.cols, rows, rows_of_out)
                   : make_map(map, t.format.dtype, t.data, count, rows, t.cols, rows_of_out);
}

template <DType A, bool A_COLUMNS, bool B_COLUMNS, int WIDTH, bool PRECISE>
bool launch(const GroupedGemm &g)
{
    const bool dw = g.kind == GROUPED_DW, fp8 = A != BF16;
    const Job job = { g.kind,
                      grouped_rows(g),
                      grouped_columns(g),
                      g.a.cols,
                      g.r.experts,
                      g.r.first,
                      fp8 ? (const float *)g.a.scale : NULL,
                      fp8 ? (const float *)g.b.scale : NULL,
                      any_out(g.out),
                      dw && !g.out.empty };
    Maps maps = {};
    if (!operand_map(&maps.a, g.a, 1, dw, TILE_ROWS) ||
        !operand_map(&maps.b, g.b, dw ? 1 : g.r.experts, g.kind != GROUPED_MATMUL, WIDTH / PAIR))
        return false;
    const int pairs = pairs_of<WIDTH>(job, job.rows), most = device_sm_count() / PAIR;
    launch_clusters(grouped_sm90_kernel<A, A_COLUMNS, B_COLUMNS, WIDTH, PRECISE>,
                    pairs < most ? pairs : most, PAIR, THREADS, sizeof(Shared<WIDTH>) + 1024, job,
                    maps);
    LAUNCH_CHECK();
    return true;
}

template <DType A>
bool launch_fp8(const GroupedGemm &g)
{
    return g.a.fast ? launch<A, false, false, 256, false>(g)
                    : launch<A, false, false, 128, true>(g);
}

} // namespace

bool grouped_gemm_sm90(const GroupedGemm &g)
{
    const DType a = g.a.format.dtype, b = g.b.format.dtype;
    if (!runs_on_hopper() || g.r.experts > MOST_EXPERTS || g.out.cols % 8 ||
        (uintptr_t)g.out.data % 16)
        return false;
    if (a == BF16)
        return g.kind == GROUPED_MATMUL ? launch<BF16, false, false, 256, false>(g)
               : g.kind == GROUPED_DX   ? launch<BF16, false, true, 256, false>(g)
                                        : launch<BF16, true, true, 256, false>(g);
    if (b != E4M3 || (a != E4M3 && a != E5M2))
        return false;
    return a == E4M3 ? launch_fp8<E4M3>(g) : launch_fp8<E5M2>(g);
}
