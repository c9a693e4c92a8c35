/* The first product of the MLP, with SwiGLU on its registers, for compute capability 9.0: what matmul writes in BF16, and
 * swiglu_forward_exact reads again, does not leave the chip. Bytes per element of act: 2.12 + 1 instead of 4 + 4 + 2.12 + 1.
 *
 * A tile is 128 tokens by 128 columns of gate and the same columns of up. Two blocks form a cluster and have tiles of the same
 * columns at the same time: each fetches its own tokens, and gate or up for both. Of a block's three warpgroups two own 64 tokens
 * each, with all sums of a tile in registers, and the third moves data. When its sums are complete a thread holds them in BF16, and
 * computes and stores what comes of them while products of the next tile run.
 *
 * A thread's sums stand where wgmma puts them: of every eight columns it has two. So that it has 16 neighbours - a group of what
 * is saved, and 16 bytes of codes - rows of weights are fetched in another order: row 16t + 2j + c of 64 goes to place
 * 8j + 2t + c. A map of five dimensions says so.
 *
 * act is encoded within its range, which is KEPT. A second launch returns at once unless that was exceeded; then it makes all of it
 * again. Sums grow in short accumulators, 32 terms at a time in their order, as cuBLASLt's do. */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/tiles.cuh"

namespace {

constexpr int TOKENS = 128, COLUMNS = 128, DEPTH = 128, PAIR = 2;      /* DEPTH: terms of the sums that a stage holds */
constexpr int STAGES = 4, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int PARTS = 8;                /* in which a tile is finished */

struct Stage { uint8_t x[TOKENS * DEPTH], w[2 * COLUMNS * DEPTH]; };

/* "full" is for whoever reads, "empty" for whoever writes next: readers of both blocks arrive at both. */
struct alignas(1024) Shared {
    Stage stage[STAGES];
    Barrier full[STAGES], empty[STAGES];
};

struct Job {
    int N, F, C;
    const float *scale_x, *scale_w;
    TileOut act;
    GroupOut saved;
    Found found;
    bool again;                         /* only if the range was exceeded */
};

__host__ __device__ int pairs_of(const Job &job)
{
    return (job.N + PAIR * TOKENS - 1) / (PAIR * TOKENS);
}

__host__ __device__ int tiles_of(const Job &job)
{
    return pairs_of(job) * (job.F / COLUMNS);
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int SUMS = 64 * 2 * COLUMNS / 128;    /* of a tile that a thread has */
constexpr int TOGETHER = 8;     /* pairs of tiles of tokens that go through all columns together: they stay in the L2 cache */

struct Place { int token, column; };

/* The first token of both blocks' tiles, and the first column. */
__device__ Place place_of(const Job &job, int tile)
{
    const int across = job.F / COLUMNS, first = tile / (TOGETHER * across) * TOGETHER;
    const int count = min(TOGETHER, pairs_of(job) - first), i = tile - first * across;
    return { (first + i % count) * PAIR * TOKENS, i / count * COLUMNS };
}

/* One thread. rank: which of the two blocks; the first fetches gate, the second up. */
__device__ void load(Shared &s, const Job &job, const CUtensorMap *x, const CUtensorMap *w, int rank)
{
    Ring<STAGES> ring;
    for (int tile = blockIdx.x / PAIR; tile < tiles_of(job); tile += gridDim.x / PAIR) {
        const Place at = place_of(job, tile);
        const int rows = (rank * job.F + at.column) / 64;
        for (int k = 0; k < job.C; k += DEPTH) {
            const Ring<STAGES> to = ring.take();
            Stage &stage = s.stage[to.stage];
            Barrier *full = &s.full[to.stage];
            barrier_wait(&s.empty[to.stage], to.parity ^ 1);
            barrier_expect(full, sizeof(Stage));
            load_box(stage.x, x, k, at.token + rank * TOKENS, 0, full);
            load_box_everywhere(stage.w + rank * COLUMNS * DEPTH, w, k, rows, full, (1 << PAIR) - 1);
        }
    }
}

/* Starts the products of the next stage's terms; returns where it is. */
__device__ inline Ring<STAGES> start_products(float (&sum)[SUMS], Shared &s, Ring<STAGES> &ring, int group, bool add)
{
    const Ring<STAGES> at = ring.take();
    const uint32_t x = operand(s.stage[at.stage].x + group * 64 * DEPTH, 0), w = operand(s.stage[at.stage].w, 0);
    barrier_wait(&s.full[at.stage], at.parity);
    products_fence();
#pragma unroll
    for (int j = 0; j < DEPTH; j += 32)
        product_e4m3(sum, x + operand_step(j), w + operand_step(j), add || j > 0);
    products_commit();
    return at;
}

/* What a thread has of a tile in BF16, two columns a word, in the order of the sums; and where. */
struct Held {
    uint32_t pair[SUMS / 2];
    int row, column;                    /* the thread's first; behind the last row: nothing is held */
};

__device__ inline void hold(Held &held, const float (&sum)[SUMS], float scale, Place at)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(sum[2 * i] * scale, sum[2 * i + 1] * scale);
        held.pair[i] = *(const uint32_t *)&two;
    }
    held.row = at.token + threadIdx.x / 32 * 16 + lane / 4;
    held.column = at.column + 16 * (lane % 4);
}

__device__ inline void unpack(float (&v)[2][8], const uint32_t (&pair)[SUMS / 2], int first)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t two = pair[first + 2 * k];
        v[k / 4][2 * k % 8] = __uint_as_float(two << 16);
        v[k / 4][2 * k % 8 + 1] = __uint_as_float(two & 0xffff0000u);
    }
}

__device__ inline void store_codes(uint8_t *to, const float (&v)[2][8], float inverse)
{
    const uint2 a = encode_pack<E4M3>(v[0], inverse), b = encode_pack<E4M3>(v[1], inverse);
    *(uint4 *)to = make_uint4(a.x, a.y, b.x, b.y);
}

__device__ inline float abs_max(const float (&v)[2][8])
{
    return fmaxf(pack_abs_max(v[0]), pack_abs_max(v[1]));
}

__device__ inline void store_whole_group(GroupOut out, size_t at, const float (&v)[2][8])
{
    const uint8_t scale = fp8_group_scale(abs_max(v), E4M3);
    store_codes(out.data + at, v, inverse_of_few_bits(fp8_group_value(scale, E4M3)));
    out.scale[at / 16] = scale;
}

/* Stores one of the PARTS of what is held: of 16 columns gate and up as saved, or act; raises m to the largest act. */
__device__ inline void finish(float &m, const Held &held, int part, const Job &job, float inverse)
{
    const int half = part / 2 % 2, below = part / 4, row = held.row + 8 * below;
    const size_t at = (size_t)row * job.F + held.column + 64 * half, gate_at = at + (size_t)row * job.F;
    float gate[2][8], up[2][8], act[2][8];
    unpack(gate, held.pair, 16 * half + below);
    unpack(up, held.pair, SUMS / 4 + 16 * half + below);
    if (row >= job.N)
        return;
    if (part % 2 == 0) {
        store_whole_group(job.saved, gate_at, gate);
        store_whole_group(job.saved, gate_at + job.F, up);
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            act[i / 8][i % 8] = gate[i / 8][i % 8] * quick_sigmoid(gate[i / 8][i % 8]) * up[i / 8][i % 8];
        store_codes(job.act.data + at, act, inverse);
        m = fmaxf(m, abs_max(act));
    }
}

/* A warpgroup. A tile is finished while products of the next one run, each part beside those of one stage. */
__device__ void consume(Shared &s, const Job &job, int rank)
{
    const int group = uniform(threadIdx.x / 128);
    const float seen = *job.found.amax, scale = *job.scale_x * *job.scale_w;
    const float inverse = 1.0f / tile_scale(job.act, *tile_scale_from(job.act));
    float sum[SUMS], m = 0;
    Held held;
    held.row = job.N;
    Ring<STAGES> ring;
    for (int tile = blockIdx.x / PAIR; tile < tiles_of(job); tile += gridDim.x / PAIR) {
        Ring<STAGES> before = start_products(sum, s, ring, group, false);
        const auto next_products = [&] {
            const Ring<STAGES> at = start_products(sum, s, ring, group, true);
            products_wait<1>();
            barrier_arrive_everywhere<PAIR>(&s.empty[before.stage]);
            before = at;
        };
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            finish(m, held, part, job, inverse);
            next_products();
        }
        for (int k = (PARTS + 1) * DEPTH; k < job.C; k += DEPTH)
            next_products();
        products_wait<0>();
        barrier_arrive_everywhere<PAIR>(&s.empty[before.stage]);
        keep_in_place(sum);
        Place at = place_of(job, tile);
        at.token += rank * TOKENS;
        hold(held, sum, scale, at);
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        finish(m, held, part, job, inverse);
    raise_amax_by_warp(job.found.amax, seen, m);
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
matmul_swiglu_kernel(const Job job, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory + (-shared_address(memory) & 1023));
    const int rank = blockIdx.x % PAIR;
    if (job.again && was_in_range(job.act, job.found))
        return;
    if (threadIdx.x == 0) {
        prefetch_map(&x);
        prefetch_map(&w);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], PAIR * CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    cluster_barrier<PAIR>();
    if (threadIdx.x >= CONSUMERS) {
        registers_shrink<24>();
        if (threadIdx.x == CONSUMERS)
            load(s, job, &x, &w, rank);
    } else {
        registers_grow<240>();
        consume(s, job, rank);
    }
    cluster_end<PAIR>();
#endif
}

/* ---- launch ------------------------------------------------------------------------------------------------- */

struct Maps { CUtensorMap x, w; };

bool map_tokens(CUtensorMap *map, Tensor x)
{
    const cuuint64_t row = (cuuint64_t)x.cols, sizes[] = { row, (cuuint64_t)x.rows, 1 }, strides[] = { row, row * sizes[1] };
    const cuuint32_t box[] = { DEPTH, TOKENS, 1 };
    return tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, x.data, sizes, strides, box);
}

/* Behind a row's elements: c, t, j, and which 64 rows. NOTE: cuTensorMapEncodeTiled's documentation shows strides that only grow.
 * Drivers take these too; where one refuses, the two operations run one after the other. */
bool map_weights(CUtensorMap *map, Tensor w)
{
    const cuuint64_t row = (cuuint64_t)w.cols, sizes[] = { row, 2, 4, 8, (cuuint64_t)w.rows / 64 };
    const cuuint64_t strides[] = { row, 16 * row, 2 * row, 64 * row };
    const cuuint32_t box[] = { DEPTH, 2, 4, 8, COLUMNS / 64 };
    return tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, w.data, sizes, strides, box);
}

void launch(const Job &job, const Maps &maps)
{
    const int tiles = tiles_of(job), most = device_sm_count() / PAIR;
    launch_clusters(matmul_swiglu_kernel, tiles < most ? tiles : most, PAIR, THREADS, sizeof(Shared) + 1024, job, maps.x, maps.w);
    LAUNCH_CHECK();
}

bool is_rows(Tensor t)
{
    return t.format.dtype == E4M3 && t.format.group == 0 && (uintptr_t)t.data % 16 == 0;
}

bool fits(Maps *maps, Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w)
{
    return runs_on_hopper() && matmul_is_fast() && is_rows(x) && is_rows(w) && is_rows(act) && !act.data_t && range_is_kept(act)
        && wide.format.dtype == BF16 && gate_up.format.dtype == E4M3 && gate_up.format.group == 16
        && (uintptr_t)gate_up.data % 16 == 0 && act.cols % COLUMNS == 0 && x.cols % 16 == 0 && x.cols > PARTS * DEPTH
        && map_tokens(&maps->x, x) && map_weights(&maps->w, w);
}

}

void matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w)
{
    const int N = x.rows, C = x.cols, F = act.cols;
    Maps maps;
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(w, 2 * F, C);
    CHECK_TENSOR(wide, N, 2 * F);
    if (!fits(&maps, act, gate_up, wide, x, w)) {
        matmul(wide, x, w, {});
        swiglu_forward_exact(act, gate_up, wide, {});
        return;
    }
    check_operand("matmul_swiglu", "act", act, N, F);
    check_groups("matmul_swiglu", "gate_up", gate_up, N, 2 * F);
    const Found found = found_new();
    Job job = { N, F, C, (const float *)x.scale, (const float *)w.scale, tile_out_in_range(act, found), group_out(gate_up), found,
                false };
    launch(job, maps);
    job.act = tile_out_again(act, found);
    job.again = true;
    launch(job, maps);
}
