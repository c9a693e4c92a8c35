/* y = low wT [+ add], all in BF16: y is written once.
 *
 * A block holds w's part of its columns in shared memory, as tensor cores read it, and goes through 512 tokens; a warp has 64
 * columns of 32 tokens. Which columns lie side by side in a product is chosen so that a thread gets eight neighbours of a row. */
#include "kernels/cuda/lora.cuh"

static constexpr int WARPS = 8, TOKENS = 512, WARP_COLUMNS = 64;
static constexpr int MAX_BYTES = 96 * 1024;     /* of shared memory: what all GPUs have */

/* How w lies in shared memory. */
struct Layout {
    int column_warps;       /* side by side; the others have other tokens */
    int steps;              /* products over 16 of the rank               */
};

/* Pack [warp][step][pair of eights of columns][lane 4 g + t]: ranks 16 step + 4 t .. + 3 of a column of both eights. Column g of
 * eight q of four is column 8 (g/2) + 2 q + g % 2 of 32. 0 behind the part's columns and behind the rank. */
__device__ static inline void hold_matrix(uint4 *packs, const bf16 *w, const LoraParts &parts, const LoraPart &part, int c0,
                                          Layout l)
{
    const int columns = l.column_warps * WARP_COLUMNS, quads = 4 * l.steps;
    for (int i = threadIdx.x; i < columns * quads; i += 32 * WARPS) {
        const bool ranks_first = parts.by_low == 1;
        const int quad = ranks_first ? i % quads : i / columns, c = ranks_first ? i / quads : i % columns;
        const bf16 *from = w + part.at + (c0 + c) * parts.by_column;
        uint32_t bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            bits[e] = c0 + c < part.width && 4 * quad + e < parts.rank ? element_bits(from + (4 * quad + e) * parts.by_low) : 0;
        const int g = c / 8 % 4 * 2 + c % 2, q = c / 2 % 4, pair = c / 32 % 2 * 2 + q / 2;
        const int at = ((c / WARP_COLUMNS * l.steps + quad / 4) * 4 + pair) * 32 + 4 * g + quad % 4;
        ((uint2 *)packs)[2 * at + q % 2] = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
}

/* Elements j .. j + 3 of a row of low; 0 behind the rank. */
__device__ static inline uint2 load_low(const bf16 *row, int j, int rank, bool aligned)
{
    if (aligned && j + 4 <= rank)
        return *(const uint2 *)(row + j);
    uint32_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        bits[e] = j + e < rank ? element_bits(row + j + e) : 0;
    return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

__global__ __launch_bounds__(32 * WARPS, 2)
void widen_fast_kernel(bf16 *y, const bf16 *low, const bf16 *w, const bf16 *add, LoraParts parts, int N, int C, Layout l,
                       bool low_aligned)
{
    extern __shared__ uint4 packs[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / l.column_warps;
    const int low_cols = parts.count * parts.rank;
    const LoraPart part = part_of_block(parts, blockIdx.x);
    const int c0 = (blockIdx.x - part.block) * l.column_warps * WARP_COLUMNS;
    hold_matrix(packs, w, parts, part, c0, l);
    __syncthreads();
    const int column = c0 + warp % l.column_warps * WARP_COLUMNS + lane % 4 * 8;        /* eight from it on, and from 32 behind it */
    const uint4 *matrix = packs + warp % l.column_warps * l.steps * 4 * 32 + lane;
    const int first = blockIdx.y * TOKENS, end = min(N, first + TOKENS);
    for (int n = first + 32 * group + lane / 4; n - lane / 4 < end; n += 32 * (WARPS / l.column_warps)) {
        /* sums [32 columns h, 16 tokens m][eight q], of which [k] is column 2 q + k % 2 of token n + 16 m + 8 (k / 2) */
        float sum[2][8][4] = {};
        if (add) {
            Pack<bf16> before[4][2];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int token = n + i / 2 * 8, c = column + i % 2 * 32;
                const int left = token < end ? part.width - c : 0;
                before[i / 2][i % 2] = load_pack<true>(add + (size_t)token * C + part.first + c, left);
            }
#pragma unroll
            for (int i = 0; i < 64; i++)        /* [token][32 columns][column] */
                sum[i / 32][i / 8 % 2 * 4 + i % 8 / 2][i / 16 % 2 * 2 + i % 2] = before[i / 16][i / 8 % 2][i % 8];
        }
        for (int step = 0; step < l.steps; step++) {
            uint32_t a[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int token = n + 8 * m, j = 16 * step + lane % 4 * 4;
                const bf16 *row = low + (size_t)token * low_cols + part.low;
                const uint2 two = load_low(row, j, token < end ? parts.rank : 0, low_aligned);
                a[m / 2][m % 2] = two.x;
                a[m / 2][m % 2 + 2] = two.y;
            }
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const uint4 b = matrix[(step * 4 + pair) * 32];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply_add(sum[m][2 * pair], a[m], b.x, b.y);
                    multiply_add(sum[m][2 * pair + 1], a[m], b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int token = n + i / 2 * 8, c = column + i % 2 * 32;
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; k++)
                v[k] = sum[i / 4][i % 2 * 4 + k / 2][i / 2 % 2 * 2 + k % 2];
            store_pack<true>(y + (size_t)token * C + part.first + c, v, token < end ? part.width - c : 0);
        }
    }
}

bool lora_widen_fast(Tensor y, Tensor low, Tensor w, LoraParts parts, Tensor add)
{
    Layout l = { WARPS, (int)ceil_div(parts.rank, 16) };
    const auto bytes = [&] { return l.column_warps * l.steps * 4 * 32 * (int)sizeof(uint4); };
    while (l.column_warps > 1 && bytes() > MAX_BYTES)
        l.column_warps /= 2;
    if (y.format.dtype != BF16 || low.format.dtype != BF16 || w.format.dtype != BF16 || !parts_aligned(parts, y, 8) ||
        !is_aligned(add, 8) || bytes() > MAX_BYTES)
        return false;
    const bool low_aligned = low.cols % 4 == 0 && parts.rank % 4 == 0 && (uintptr_t)low.data % 8 == 0;
    const dim3 grid((unsigned)number_blocks(parts, l.column_warps * WARP_COLUMNS), (unsigned)ceil_div(y.rows, TOKENS));
    const auto kernel = widen_fast_kernel;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_BYTES));
    kernel<<<grid, 32 * WARPS, bytes(), device_stream()>>>((bf16 *)y.data, (const bf16 *)low.data, (const bf16 *)w.data,
                                                           (const bf16 *)add.data, parts, y.rows, y.cols, l, low_aligned);
    LAUNCH_CHECK();
    return true;
}
