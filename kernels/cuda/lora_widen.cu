/* y = xa wT [+ add], all in BF16. y is written once. A warp has 64 columns of 32 tokens, and a
 * block loops over 512 tokens, or 128 of one expert. */
#include "kernels/cuda/strips.cuh"

static constexpr int TOKENS = 512, M = 2, THREADS = 32 * STRIP_WARPS;

__global__ __launch_bounds__(THREADS, 2) void widen_fast_kernel(bf16 *y, const bf16 *add, Product p,
                                                                LoraGroups groups, int tokens,
                                                                int N, int C)
{
    extern __shared__ uint4 packs[];
    const Layout l = p.layout;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / l.column_warps;
    const LoraProjection projection = projection_of_block(p.projections, blockIdx.x);
    const int c0 = (blockIdx.x - projection.block) * l.column_warps * 2 * STRIP;
    const int first = blockIdx.y * tokens, end = min(N, first + tokens),
              item = group_of(groups, first);
    if (item < 0)
        return;
    hold_matrix(packs, p, [&](int i) {
        const Strip s = strip_of(p.projections, projection, c0 + STRIP * i);
        return Strip{ s.at + item * groups.matrix, s.left };
    });
    __syncthreads();
    /* eight columns from `column` on, and eight columns one strip later */
    const int column = c0 + warp % l.column_warps * 2 * STRIP + lane % 4 * 8;
    const uint4 *matrix = packs + warp % l.column_warps * l.steps * 4 * 32 + lane;
    const int xa[2] = { projection.xa, projection.xa };
    for (int n = first + 16 * M * group + lane / 4; n - lane / 4 < end;
         n += 16 * M * (STRIP_WARPS / l.column_warps)) {
        float sum[M][8][4] = {};
        if (add) {
            Pack<bf16> before[2 * M][2];
#pragma unroll
            for (int i = 0; i < 4 * M; i++) {
                const int token = n + i / 2 * 8, c = column + i % 2 * STRIP;
                const int left = token < end ? projection.width - c : 0;
                before[i / 2][i % 2] =
                    load_pack<true>(add + (size_t)token * C + projection.first + c, left);
            }
#pragma unroll
            for (int i = 0; i < 32 * M; i++)
                strip_element(sum, i / 16, i / 8 % 2, i % 8) = before[i / 16][i / 8 % 2][i % 8];
        }
        add_product(sum, matrix, p, xa, n, end);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            const int token = n + i / 2 * 8, c = column + i % 2 * STRIP;
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; k++)
                v[k] = strip_element(sum, i / 2, i % 2, k);
            store_pack<true>(y + (size_t)token * C + projection.first + c, v,
                             token < end ? projection.width - c : 0);
        }
    }
}

bool lora_widen_fast(Tensor y, Tensor xa, Tensor w, LoraProjections projections, LoraGroups groups,
                     Tensor add)
{
    Product p;
    if (!choose_product(&p, xa, w, projections, 0) || y.format.dtype != BF16 ||
        !projections_aligned(projections, y, 8) || !is_aligned(add, 8))
        return false;
    const int tokens = groups.first ? EXPERT_ROWS : TOKENS;
    const dim3 grid((unsigned)number_blocks(p.projections, p.layout.column_warps * 2 * STRIP),
                    (unsigned)ceil_div(y.rows, tokens));
    const auto kernel = widen_fast_kernel;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, STRIP_BYTES));
    kernel<<<grid, THREADS, strip_bytes(p.layout, 0), device_stream()>>>(
        (bf16 *)y.data, (const bf16 *)add.data, p, groups, tokens, y.rows, y.cols);
    LAUNCH_CHECK();
    return true;
}
