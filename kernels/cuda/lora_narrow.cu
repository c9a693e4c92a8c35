/* xa = scale x w for x in BF16 or FP8 and w in BF16. x is read once.
 *
 * A block has 128 tokens and up to 64 columns of xa. The block loops over the columns of one
 * projection in stages of 128 bytes per token; the copies of several stages to shared memory are in
 * flight. Four warps share 32 tokens: each warp sums a quarter of every stage, and the quarters are
 * added at the end. A block also reads all of w, from L2. If x is in FP8, w has NT/8 times the
 * bytes of the block's projection of x. If x is in BF16, w has half of that. A first kernel stores
 * w in the layout of tensor-core operands. */
#include "kernels/cuda/lora.cuh"

static_assert(EXPERT_ROWS % 128 == 0, "a block has rows of one expert");
static constexpr int TOKENS = 128, SLICES = 4, THREADS = 512, ROW_BYTES = 128,
                     X_PACKS = TOKENS * ROW_BYTES / 16;
static constexpr int MAX_RANK = 64; /* per block */

/* NT: columns of xa / 8. NT is even. */
template <int NT>
constexpr int STAGES = NT <= 4 ? 4 : 3;
/* columns of x in a stage */
template <DType D>
constexpr int COLUMNS = ROW_BYTES / WIDE_BYTES<D>;
/* products over 16 columns in a slice of a stage */
template <DType D>
constexpr int STEPS = COLUMNS<D> / SLICES / 16;
/* packs of w, 16 bytes each, in a stage */
template <DType D, int NT>
constexpr int W_PACKS = SLICES * STEPS<D> * (NT / 2) * 32;

/* ---- w as tensor cores read it --------------------------------------------------------------- */

/* Packs are indexed [matrix][stage][block of ranks][slice][step][pair of groups of eight ranks][lane 4 g +
 * t]. A pack holds elements of w for columns 4 step to 4 step + 3 of thread t's columns in the
 * slice, at rank g of both groups. Elements after the projection's last column or after the last
 * rank are 0. */
template <DType D, int NT>
__global__ __launch_bounds__(256) void lay_out_kernel(uint4 *packs, const bf16 *w,
                                                      LoraProjections projections,
                                                      LoraGroups groups, int rank_blocks, int count)
{
    const int at = blockIdx.x * 256 + threadIdx.x, i = at % count, lane = i % 32,
              pair = i / 32 % (NT / 2), step = i / (16 * NT) % STEPS<D>;
    const int slice = i / (16 * NT * STEPS<D>) % SLICES, block = i / W_PACKS<D, NT> % rank_blocks;
    const int stage = i / W_PACKS<D, NT> / rank_blocks;
    if (at / count >= groups.count)
        return;
    w += at / count * groups.matrix;
    const LoraProjection projection = projection_of_block(projections, stage);
    const int column = (stage - projection.block) * COLUMNS<D> +
                       (4 * slice + lane % 4) * (COLUMNS<D> / 16) + 4 * step;
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int c = column + k % 2 * 2, j = (block * NT + 2 * pair + k / 2) * 8 + lane / 4;
        const bf16 *from = w + projection.at + c * projections.by_column + j * projections.by_rank;
        const bool known = j < projections.rank;
        word[k] = known && c < projection.width ? element_bits(from) : 0;
        word[k] |= known && c + 1 < projection.width
                       ? element_bits(from + projections.by_column) << 16
                       : 0;
    }
    packs[at] = make_uint4(word[0], word[1], word[2], word[3]);
}

/* ---- stages ---------------------------------------------------------------------------------- */

/* Copies `bytes` of 16 bytes to shared memory. The other bytes become 0. */
__device__ static inline void copy_async(uint4 *to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}

__device__ static inline void close_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all groups of copies except the last BUT. */
template <int BUT>
__device__ static inline void wait_groups()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory");
}

/* Starts the copies of a stage: x, then w. The 16-byte chunk c of a token goes to position c ^ 2
 * (token % 4), so that a warp's read uses different banks. */
template <DType D, int NT>
__device__ static inline void fetch(uint4 *to, const uint8_t *x, const uint4 *w,
                                    const LoraProjection &projection, int stage, int n0, int N,
                                    int C)
{
#pragma unroll
    for (int k = 0; k < X_PACKS / THREADS; k++) {
        const int i = threadIdx.x + k * THREADS, token = i / 8, chunk = i % 8,
                  at = stage * ROW_BYTES + 16 * chunk;
        const int left = n0 + token < N ? projection.width * WIDE_BYTES<D> - at : 0;
        const uint8_t *from =
            x + ((size_t)(n0 + token) * C + projection.first) * WIDE_BYTES<D> + at;
        copy_async(to + 8 * token + (chunk ^ 2 * (token % 4)), left > 0 ? from : x,
                   min(max(left, 0), 16));
    }
#pragma unroll
    for (int k = 0; k < (W_PACKS<D, NT> + THREADS - 1) / THREADS; k++) {
        const int i = threadIdx.x + k * THREADS;
        if (i < W_PACKS<D, NT>)
            copy_async(to + X_PACKS + i, w + i, 16);
    }
}

/* Adds the products of the warp's slice of a stage. */
template <DType D, int NT>
__device__ static inline void add_stage(float (&sum)[2][NT][4], const uint4 *stage)
{
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % SLICES,
              first = threadIdx.x / 32 / SLICES * 32 + lane / 4;
    const uint4 *w = stage + X_PACKS + slice * (STEPS<D> * (NT / 2) * 32) + lane;
    uint2 raw[2][2]; /* elements of tokens first, first + 8, first + 16 and first + 24 */
#pragma unroll
    for (int m = 0; m < 4; m++)
        raw[m / 2][m % 2] =
            ((const uint2 *)stage)[(first + 8 * m) * 16 + (slice ^ first % 4) * 4 + lane % 4];
#pragma unroll
    for (int step = 0; step < STEPS<D>; step++) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const uint2 r = raw[m / 2][m % 2];
            if constexpr (D == BF16) {
                a[m / 2][m % 2] = r.x;
                a[m / 2][m % 2 + 2] = r.y;
            } else {
                const float2 u = decode_two<D>(step ? r.y : r.x, 0),
                             v = decode_two<D>(step ? r.y : r.x, 1);
                a[m / 2][m % 2] = bf16_pair(u.x, u.y);
                a[m / 2][m % 2 + 2] = bf16_pair(v.x, v.y);
            }
        }
#pragma unroll
        for (int pair = 0; pair < NT / 2; pair++) {
            const uint4 b = w[(step * (NT / 2) + pair) * 32];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply_add(sum[m][2 * pair], a[m], b.x, b.y);
                multiply_add(sum[m][2 * pair + 1], a[m], b.z, b.w);
            }
        }
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Adds the slices as (0 + 2) + (1 + 3). Slice 0 gets the sum. */
template <int NT>
__device__ static inline void add_slices(float (&sum)[2][NT][4], float *shared)
{
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % SLICES,
              group = threadIdx.x / 32 / SLICES;
#pragma unroll
    for (int half = SLICES / 2; half > 0; half /= 2) {
        float *at = shared + (slice % half * (TOKENS / 32) + group) * (8 * NT * 32) + lane;
        __syncthreads();
        if (slice >= half && slice < 2 * half)
#pragma unroll
            for (int i = 0; i < 8 * NT; i++)
                at[32 * i] = sum[i / (4 * NT)][i / 4 % NT][i % 4];
        __syncthreads();
        if (slice < half)
#pragma unroll
            for (int i = 0; i < 8 * NT; i++)
                sum[i / (4 * NT)][i / 4 % NT][i % 4] += at[32 * i];
    }
}

template <DType D, int NT>
__global__ __launch_bounds__(THREADS, NT == 2 ? 2 : 1) void narrow_fast_kernel(
    AnyOut xa, const uint8_t *x, const float *x_scale, const uint4 *packs, int packs_of_matrix,
    LoraProjections projections, LoraGroups groups, int N, int C, float scale, int rank_blocks)
{
    extern __shared__ uint4 stages[];
    constexpr int AHEAD = STAGES<NT> - 1, STAGE_PACKS = X_PACKS + W_PACKS<D, NT>;
    const LoraProjection projection = projection_number(projections, blockIdx.y);
    const int rank_block = blockIdx.x % rank_blocks, n0 = blockIdx.x / rank_blocks * TOKENS;
    const int count = (projection.width + COLUMNS<D> - 1) / COLUMNS<D>,
              group = group_of(groups, n0);
    float sum[2][NT][4] = {};
    if (group < 0)
        return;
    packs += (size_t)group * packs_of_matrix;
    const auto begin = [&](int stage) {
        const uint4 *w = packs + ((size_t)(projection.block + stage) * rank_blocks + rank_block) *
                                     W_PACKS<D, NT>;
        if (stage < count)
            fetch<D, NT>(stages + stage % STAGES<NT> * STAGE_PACKS, x, w, projection, stage, n0, N,
                         C);
        close_group();
    };
    for (int i = 0; i < AHEAD; i++)
        begin(i);
    for (int i = 0; i < count; i++) {
        wait_groups<AHEAD - 1>();
        /* Stage i has arrived. All warps have read stage i - 1, whose slot stage i + AHEAD uses. */
        __syncthreads();
        begin(i + AHEAD);
        add_stage<D, NT>(sum, stages + i % STAGES<NT> * STAGE_PACKS);
    }
    wait_groups<0>();
    add_slices<NT>(sum, (float *)stages);
    if (threadIdx.x / 32 % SLICES > 0)
        return;
    const int lane = threadIdx.x % 32, first = n0 + threadIdx.x / 32 / SLICES * 32 + lane / 4;
    const float factor = x_scale ? scale * *x_scale : scale;
#pragma unroll
    for (int i = 0; i < 8 * NT; i++) {
        const int m = i / (4 * NT), k = i % 4, n = first + 16 * m + k / 2 * 8;
        const int j = (rank_block * NT + i / 4 % NT) * 8 + lane % 4 * 2 + k % 2;
        const size_t at = (size_t)n * (projections.count * projections.rank) + projection.xa + j;
        const float value = sum[m][i / 4 % NT][k] * factor;
        if (n < N && j < projections.rank && xa.is_f32)
            ((float *)xa.data)[at] = value;
        else if (n < N && j < projections.rank)
            ((bf16 *)xa.data)[at] = from_float<bf16>(value);
    }
}

template <DType D, int NT>
static void launch(Tensor xa, Tensor x, Tensor w, LoraProjections projections, LoraGroups groups,
                   float scale, int rank_blocks)
{
    const int N = x.rows,
              count = number_blocks(projections, COLUMNS<D>) * rank_blocks * W_PACKS<D, NT>;
    const int bytes = STAGES<NT> * (X_PACKS + W_PACKS<D, NT>)*(int)sizeof(uint4);
    const size_t packs_of_all = (size_t)count * groups.count;
    uint4 *packs = (uint4 *)device_scratch(packs_of_all * sizeof *packs, SCRATCH_0);
    const auto kernel = narrow_fast_kernel<D, NT>;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    lay_out_kernel<D, NT><<<(unsigned)ceil_div(packs_of_all, 256), 256, 0, device_stream()>>>(
        packs, (const bf16 *)w.data, projections, groups, rank_blocks, count);
    LAUNCH_CHECK();
    const dim3 grid((unsigned)ceil_div(N, TOKENS) * rank_blocks, projections.count);
    kernel<<<grid, THREADS, bytes, device_stream()>>>(any_out(xa), (const uint8_t *)x.data,
                                                      scale_of(x), packs, count, projections,
                                                      groups, N, x.cols, scale, rank_blocks);
    LAUNCH_CHECK();
}

bool lora_narrow_fast(Tensor xa, Tensor x, Tensor w, LoraProjections projections, LoraGroups groups,
                      float scale)
{
    const int rank_blocks = (int)ceil_div(projections.rank, MAX_RANK),
              ranks = (int)ceil_div(projections.rank, rank_blocks);
    if (x.format.dtype == F32 || w.format.dtype != BF16 ||
        !projections_aligned(projections, x, 16 / (int)dtype_size(x.format.dtype)))
        return false;
    with_wide(x, [&](auto format) {
        constexpr DType D = decltype(format)();
        if (ranks <= 16)
            launch<D, 2>(xa, x, w, projections, groups, scale, rank_blocks);
        else if (ranks <= 32)
            launch<D, 4>(xa, x, w, projections, groups, scale, rank_blocks);
        else if (ranks <= 48)
            launch<D, 6>(xa, x, w, projections, groups, scale, rank_blocks);
        else
            launch<D, 8>(xa, x, w, projections, groups, scale, rank_blocks);
    });
    return true;
}
