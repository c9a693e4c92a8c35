/* dw += xaT x for xa in BF16 and x in BF16 or FP8. x is read once, directly into registers.
 *
 * A block has 128 columns of x, up to 64 columns of xa and a range of tokens. The two warps of a
 * pair have 64 columns each, and four pairs alternate over the tokens. The sums of warps are added
 * in shared memory; a second kernel adds the sums of blocks. Both orders are fixed. The F32 sums of
 * blocks go through memory, at 8 bytes per element of w and range. So there are only as many ranges
 * as fill the GPU. A thread loads eight neighbours of four rows: one column of eight products, each
 * over 16 tokens. */
#include "kernels/cuda/lora.cuh"

static constexpr int THREADS = 256, COLUMNS = 128, SLICES = 4, MAX_RANK = 64;

/* JT: columns of xa / 16. In shared memory the rows of xa have 16 bytes of padding, so that eight
 * rows use different banks. */
template <int JT>
constexpr int XA_STRIDE = 16 * JT + 8;
template <int JT>
constexpr int XA_TOKENS = JT == 1   ? 2048
                          : JT == 2 ? 1024
                          : JT == 3 ? 768
                                    : 512;
/* number of groups of 16 tokens that a warp has in flight */
template <DType D>
constexpr int UNROLL = 4 / WIDE_BYTES<D>;
template <DType D>
constexpr int STEP = SLICES * 16 * UNROLL<D>; /* tokens of all warps in a step */
/* tokens of a range are a multiple of RANGE, which is a multiple of STEP */
static constexpr int RANGE = 256;

/* ---- loads ----------------------------------------------------------------------------------- */

/* Eight neighbouring elements of a row. */
template <DType D>
struct Row {
    uint32_t word[2 * WIDE_BYTES<D>];
};

/* Loads a row, or zeros if `known` is false. NOTE: the same condition in C compiles to a branch,
 * and then each load waits for the previous load. */
__device__ static inline void load_row(Row<BF16> &row, const uint8_t *from, bool known)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, "
                 "0; mov.b32 %3, 0;\n"
                 "  @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=&r"(row.word[0]), "=&r"(row.word[1]), "=&r"(row.word[2]), "=&r"(row.word[3])
                 : "l"(from), "r"((int)known));
}

template <DType D>
__device__ static inline void load_row(Row<D> &row, const uint8_t *from, bool known)
{
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;\n"
                 "  @p ld.global.nc.v2.u32 {%0, %1}, [%2]; }"
                 : "=&r"(row.word[0]), "=&r"(row.word[1])
                 : "l"(from), "r"((int)known));
}

/* Loads the lane's rows of a warp's tokens from n on: rows 2t, 2t + 1, 2t + 8, 2t + 9 of each 16
 * tokens. Rows from `end` on become 0. */
template <DType D>
__device__ static inline void load_rows(Row<D> (&rows)[UNROLL<D>][4], const uint8_t *column, int n,
                                        int end, unsigned row_bytes)
{
    const int first = n + threadIdx.x % 4 * 2;
    const uint8_t *from = column + (size_t)row_bytes * first;
#pragma unroll
    for (int i = 0; i < 4 * UNROLL<D>; i++) {
        const int token = i / 4 * 16 + i / 2 % 2 * 8 + i % 2;
        load_row(rows[i / 4][i % 4], from + (size_t)row_bytes * token, first + token < end);
    }
}

/* Stores rows n .. n + count - 1 of the block's columns of xa. Rows from `end` on and columns after
 * the rank become 0. */
template <int JT>
__device__ static inline void hold_xa(bf16 *to, const bf16 *xa, int xa_cols, int ranks, int n,
                                      int count, int end, bool aligned)
{
#pragma unroll 2
    for (int i = threadIdx.x; i < count * 2 * JT; i += THREADS) {
        const int token = i / (2 * JT), j = i % (2 * JT) * 8;
        const bf16 *from = xa + (size_t)(n + token) * xa_cols + j;
        const int left = n + token < end ? ranks - j : 0;
        const Pack<bf16> pack =
            aligned && left >= 8 ? load_pack<true>(from, 8) : load_pack<false>(from, left);
        *(uint4 *)(to + token * XA_STRIDE<JT> + j) =
            make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Pairs the elements of two rows: `even` gets both elements 2i, `odd` both elements 2i + 1. */
template <DType D>
__device__ static inline void pair_rows(uint32_t &even, uint32_t &odd, const Row<D> &first,
                                        const Row<D> &second, int i)
{
    if constexpr (D == BF16) {
        even = __byte_perm(first.word[i], second.word[i], 0x5410);
        odd = __byte_perm(first.word[i], second.word[i], 0x7632);
    } else {
        const float2 u = decode_two<D>(first.word[i / 2], i % 2),
                     v = decode_two<D>(second.word[i / 2], i % 2);
        even = bf16_pair(u.x, v.x);
        odd = bf16_pair(u.y, v.y);
    }
}

/* Loads 16 columns of xa, from `to` on, for 16 tokens, transposed. The result is operand a of
 * multiply_add, with one row per column of xa. */
template <int JT>
__device__ static inline void load_transposed(uint32_t (&a)[4], const bf16 *to)
{
    const int lane = threadIdx.x % 32;
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(shared_address(to + (lane / 16 * 8 + lane % 8) * XA_STRIDE<JT> + lane / 8 % 2 * 8))
        : "memory");
}

template <DType D, int JT>
__device__ static inline void add_rows(float (&sum)[JT][8][4], const Row<D> (&rows)[UNROLL<D>][4],
                                       const bf16 *xa)
{
#pragma unroll
    for (int u = 0; u < UNROLL<D>; u++) {
        uint32_t a[JT][4];
#pragma unroll
        for (int jt = 0; jt < JT; jt++)
            load_transposed<JT>(a[jt], xa + 16 * u * XA_STRIDE<JT> + 16 * jt);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t b[2][2];
            pair_rows<D>(b[0][0], b[1][0], rows[u][0], rows[u][1], i);
            pair_rows<D>(b[0][1], b[1][1], rows[u][2], rows[u][3], i);
#pragma unroll
            for (int jt = 0; jt < JT; jt++) {
                multiply_add(sum[jt][2 * i], a[jt], b[0][0], b[0][1]);
                multiply_add(sum[jt][2 * i + 1], a[jt], b[1][0], b[1][1]);
            }
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Stores the block's sums, [column][column of xa], in shared memory. The order of addition is
 * slices (0 + 2) + (1 + 3). */
template <int JT>
__device__ static inline void gather(float *shared, float (&sum)[JT][8][4])
{
    const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 % 2, slice = threadIdx.x / 64;
#pragma unroll
    for (int half = SLICES / 2; half > 0; half /= 2) {
        float *at = shared + (slice % half * 2 + pair) * (32 * JT * 32) + lane;
        __syncthreads();
        if (slice >= half && slice < 2 * half)
#pragma unroll
            for (int i = 0; i < 32 * JT; i++)
                at[32 * i] = sum[i / 32][i / 4 % 8][i % 4];
        __syncthreads();
        if (slice < half)
#pragma unroll
            for (int i = 0; i < 32 * JT; i++)
                sum[i / 32][i / 4 % 8][i % 4] += at[32 * i];
    }
    __syncthreads();
    if (slice == 0)
#pragma unroll
        for (int i = 0; i < 32 * JT; i++) {
            const int column = 64 * pair + 8 * (lane % 4 * 2 + i % 2) + i / 4 % 8,
                      j = i / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
            shared[column * (16 * JT + 1) + j] = sum[i / 32][i / 4 % 8][i % 4];
        }
    __syncthreads();
}

/* partial: (gridDim.y, numel), with rows in the layout of dw. With experts, blockIdx.y is the expert,
 * and the block has its rows. */
template <DType D, int JT>
__global__ __launch_bounds__(THREADS, JT == 1 ? 2 : 1) void dw_fast_kernel(
    float *partial, size_t numel, const uint8_t *x, const float *x_scale, const bf16 *xa,
    LoraProjections projections, LoraGroups groups, int N, int C, int rank_blocks, int range,
    bool xa_aligned)
{
    extern __shared__ uint4 memory[];
    bf16 *held = (bf16 *)memory;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x / rank_blocks;
    const int j0 = blockIdx.x % rank_blocks * 16 * JT,
              xa_cols = projections.count * projections.rank;
    const LoraProjection projection = projection_of_block(projections, block);
    const int c0 = (block - projection.block) * COLUMNS, column = c0 + warp % 2 * 64 + lane / 4 * 8;
    const uint8_t *from = x + (size_t)(projection.first + column) * WIDE_BYTES<D>;
    const int n0 = groups.first ? groups.first[blockIdx.y] : blockIdx.y * range,
              end = groups.first ? groups.first[blockIdx.y + 1] : min(N, n0 + range),
              slice = warp / 2 * 16 * UNROLL<D>;
    const int end_x = column < projection.width ? end : 0;
    const unsigned row_bytes = C * WIDE_BYTES<D>;
    Row<D> now[UNROLL<D>][4], next[UNROLL<D>][4];
    float sum[JT][8][4] = {};
    load_rows<D>(now, from, n0 + slice, end_x, row_bytes);
    for (int n = n0; n < end; n += STEP<D>) {
        const int held_row = (n - n0) % XA_TOKENS<JT>;
        if (held_row == 0) {
            const int count = min(XA_TOKENS<JT>, (end - n + STEP<D> - 1) / STEP<D> * STEP<D>);
            __syncthreads();
            hold_xa<JT>(held, xa + projection.xa + j0, xa_cols, projections.rank - j0, n, count,
                        end, xa_aligned);
            __syncthreads();
        }
        load_rows<D>(next, from, n + STEP<D> + slice, end_x, row_bytes);
        add_rows<D, JT>(sum, now, held + (held_row + slice) * XA_STRIDE<JT>);
#pragma unroll
        for (int i = 0; i < 4 * UNROLL<D>; i++)
            now[i / 4][i % 4] = next[i / 4][i % 4];
    }
    const float *sums = (const float *)memory;
    const float factor = x_scale ? *x_scale : 1.0f;
    gather<JT>((float *)memory, sum);
    /* stores the sums in the layout of dw */
    for (int i = threadIdx.x; i < COLUMNS * 16 * JT; i += THREADS) {
        const bool ranks_first = projections.by_rank == 1;
        const int j = ranks_first ? i % (16 * JT) : i / COLUMNS,
                  c = ranks_first ? i / (16 * JT) : i % COLUMNS;
        if (c0 + c < projection.width && j0 + j < projections.rank)
            partial[blockIdx.y * numel + projection.at + (c0 + c) * projections.by_column +
                    (j0 + j) * projections.by_rank] = sums[c * (16 * JT + 1) + j] * factor;
    }
}

/* dw += partial[0] + partial[1] + ... */
__global__ __launch_bounds__(THREADS) void add_partials_kernel(AnyOut dw, bool empty,
                                                               const float *partial, int count,
                                                               size_t numel)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= numel)
        return;
    float total = 0;
#pragma unroll 8
    for (int k = 0; k < count; k++)
        total += partial[k * numel + i];
    if (dw.is_f32)
        ((float *)dw.data)[i] = empty ? total : ((float *)dw.data)[i] + total;
    else
        ((bf16 *)dw.data)[i] =
            from_float<bf16>(empty ? total : to_float(((bf16 *)dw.data)[i]) + total);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <DType D, int JT>
static void launch(Tensor dw, LoraProjections projections, LoraGroups groups, Tensor xa, Tensor x,
                   int rank_blocks)
{
    const int N = x.rows, blocks = number_blocks(projections, COLUMNS) * rank_blocks,
              wave = device_sm_count() * (JT == 1 ? 2 : 1);
    const size_t numel = groups.matrix, held = sizeof(bf16) * XA_TOKENS<JT> * XA_STRIDE<JT>;
    const size_t sums = sizeof(float) * 2 * 2 * 32 * JT * 32, bytes = held > sums ? held : sums;
    static_assert(RANGE % STEP<D> == 0 && XA_TOKENS<JT> % STEP<D> == 0,
                  "steps divide what is held");
    static_assert(COLUMNS * (16 * JT + 1) <= 2 * 2 * 32 * JT * 32, "totals fit where sums were");
    const int most = (int)ceil_div(N, RANGE), wanted = wave / blocks < 1 ? 1 : wave / blocks;
    const int range = (int)ceil_div(ceil_div(N, wanted < most ? wanted : most), RANGE) * RANGE,
              ranges = groups.first ? groups.count : (int)ceil_div(N, range);
    const bool aligned =
        xa.cols % 8 == 0 && projections.rank % 8 == 0 && (uintptr_t)xa.data % 16 == 0;
    float *partial = (float *)device_scratch(ranges * numel * sizeof(float), SCRATCH_0);
    const auto kernel = dw_fast_kernel<D, JT>;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<dim3(blocks, ranges), THREADS, bytes, device_stream()>>>(
        partial, numel, (const uint8_t *)x.data, scale_of(x), (const bf16 *)xa.data, projections,
        groups, N, x.cols, rank_blocks, range, aligned);
    LAUNCH_CHECK();
    /* with experts, each partial is the sum of another matrix */
    add_partials_kernel<<<(unsigned)ceil_div(tensor_numel(dw), THREADS), THREADS, 0,
                          device_stream()>>>(any_out(dw), dw.empty, partial,
                                             groups.first ? 1 : ranges, tensor_numel(dw));
    LAUNCH_CHECK();
}

bool lora_dw_fast(Tensor dw, LoraProjections projections, LoraGroups groups, Tensor xa, Tensor x)
{
    const int rank_blocks = (int)ceil_div(projections.rank, MAX_RANK),
              ranks = (int)ceil_div(projections.rank, rank_blocks);
    if (x.format.dtype == F32 || xa.format.dtype != BF16 || !projections_aligned(projections, x, 8))
        return false;
    with_wide(x, [&](auto format) {
        constexpr DType D = decltype(format)();
        if (ranks <= 16)
            launch<D, 1>(dw, projections, groups, xa, x, rank_blocks);
        else if (ranks <= 32)
            launch<D, 2>(dw, projections, groups, xa, x, rank_blocks);
        else if (ranks <= 48)
            launch<D, 3>(dw, projections, groups, xa, x, rank_blocks);
        else
            launch<D, 4>(dw, projections, groups, xa, x, rank_blocks);
    });
    return true;
}
