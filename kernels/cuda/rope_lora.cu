/* The rotation in one pass with the steps before it: an adapter's product is added to the output of
 * the base's GEMM, and q, k and v are saved in FP8 groups. Without norms.
 *
 * A warp has a strip of the first half of a head and the same strip of its second half, 16 tokens
 * at a time, with loads of the next tokens in flight. Bytes per element: 2 read, 2 written, 1.06
 * for FP8 groups; the tables of angles are read from L1 and L2. */
#include "kernels/cuda/rope.cuh"
#include "kernels/cuda/strips.cuh"

static constexpr int TOKENS = 256, THREADS = 32 * STRIP_WARPS;
static constexpr int SCALE_BYTES = TOKENS * 4; /* of group scales, per warp */

struct RopeShape {
    const float *rope; /* (T, D/2, 2) */
    int N, T, S, D;
    int heads, rotated; /* heads of q, k and v; of q and k */
    int strips;         /* of half a head */
    float clip;         /* INFINITY: none */
};

/* First column of strip h of pair number `pair` in a row; -1: after the row. */
__device__ static inline int pair_column(const RopeShape &a, int pair, int h)
{
    const int head = pair / a.strips;
    return head < a.heads ? head * a.D + h * (a.D / 2) + pair % a.strips * STRIP : -1;
}

/* The part of B with this column; parts are whole heads. None: width 0, xa -1. */
__device__ static inline LoraPart part_at(const LoraParts &parts, int column)
{
    LoraPart found = { 0, 0, -1, 0, 0 };
#pragma unroll
    for (int i = 0; i < LORA_PARTS; i++)
        if (i < parts.count && column >= parts.part[i].first &&
            column < parts.part[i].first + parts.part[i].width)
            found = parts.part[i];
    return found;
}

/* The thread's packs of both halves, for tokens n and n + 8; after the end those of the last
 * row. */
__device__ static inline void load_halves(Pack<bf16> (&to)[2][2], const bf16 *from, int n,
                                          const RopeShape &a)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i / 2][i % 2] = load_pack<true>(
            from + (size_t)min(n + i / 2 * 8, a.N - 1) * a.S + i % 2 * (a.D / 2), 8);
}

/* Clamps, and rotates if `rotates`; angles: eight cosines and sines. */
__device__ static inline void rotate_packs(float (&u)[8], float (&v)[8], const float4 *angles,
                                           bool rotates, float clip)
{
#pragma unroll
    for (int k = 0; k < 8; k++)
        u[k] = clamp(u[k], clip), v[k] = clamp(v[k], clip);
    if (rotates)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 r = angles[k];
            rotate(u[2 * k], v[2 * k], r.x, r.y);
            rotate(u[2 * k + 1], v[2 * k + 1], r.z, r.w);
        }
}

/* EXACT: y is computed from the sums, not from saved values. x and y may be the same memory, and so
 * may a BF16 saved. */
template <Save SAVE, bool EXACT>
__global__ __launch_bounds__(THREADS, 3) void rope_added_kernel(bf16 *y, SaveOut saved,
                                                                const bf16 *x, Product p,
                                                                RopeShape a)
{
    extern __shared__ uint4 packs[];
    const int column_warps = p.layout.column_warps, packs_each = p.layout.steps * 4 * 32;
    uint8_t *scales = (uint8_t *)(packs + column_warps * packs_each);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % column_warps,
              group = threadIdx.x / 32 / column_warps;
    const int pair0 = blockIdx.x * column_warps, strip = pair_column(a, pair0 + warp, 0),
              half = a.D / 2;
    const int column = max(strip, 0) + lane % 4 * 8, angle = column % a.D;
    const bool rotates = strip < a.rotated * a.D;
    const int first = blockIdx.y * TOKENS, end = min(a.N, first + TOKENS),
              step = 16 * (STRIP_WARPS / column_warps);
    const int part_xa = part_at(p.parts, strip).xa, xa[2] = { part_xa, part_xa };
    int n = first + 16 * group + lane / 4;
    Pack<bf16> next[2][2];
    load_halves(next, x + column, n, a);
    hold_matrix(packs, p, [&](int i) {
        const int c = pair_column(a, pair0 + i / 2, i % 2);
        const LoraPart part = part_at(p.parts, c);
        return c < 0 ? Strip{ 0, 0 } : strip_of(p.parts, part, c - part.first);
    });
    __syncthreads();
    for (; n - lane / 4 < end; n += step) {
        float sum[1][8][4];
#pragma unroll
        for (int i = 0; i < 32; i++)
            strip_element(sum, i / 16, i / 8 % 2, i % 8) = next[i / 16][i / 8 % 2][i % 8];
        if (n - lane / 4 + step < end)
            load_halves(next, x + column, n + step, a);
        add_product(sum, packs + warp * packs_each + lane, p, xa, n, end);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = n + 8 * i;
            const bool inside = token < end && strip >= 0;
            const size_t at = (size_t)token * a.S + column;
            uint8_t *scale = scales + (token - first) * 4 * column_warps + 4 * warp + lane % 4 / 2;
            float v[2][8], s[2][8];
#pragma unroll
            for (int k = 0; k < 16; k++)
                v[k / 8][k % 8] = s[k / 8][k % 8] = strip_element(sum, i, k / 8, k % 8);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                save_values<SAVE>(saved, at + h * half, s[h], scale + 2 * h, inside);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    v[h][k] = EXACT ? v[h][k] : s[h][k];
            }
            rotate_packs(v[0], v[1],
                         (const float4 *)(a.rope + (size_t)(token % a.T) * a.D + 2 * angle),
                         rotates, a.clip);
            store_pack<true>(y + at, v[0], inside ? 8 : 0);
            store_pack<true>(y + at + half, v[1], inside ? 8 : 0);
        }
    }
    if (SAVE == SAVE_GROUPS)
        store_scales(saved, scales, column_warps, first, end, a.S, [&](int slot) {
            const int c = pair_column(a, pair0 + slot / 4, slot / 2 % 2);
            return c < 0 ? c : c + slot % 2 * 16;
        });
}

/* ---- launches -------------------------------------------------------------------------------- */

template <Save SAVE, bool EXACT>
static void launch(Tensor y, SaveOut saved, Tensor x, const Product &p, const RopeShape &a)
{
    const int pairs = a.heads * a.strips, bytes = strip_bytes(p.layout, SCALE_BYTES);
    const dim3 grid((unsigned)ceil_div(pairs, p.layout.column_warps),
                    (unsigned)ceil_div(a.N, TOKENS));
    const auto kernel = rope_added_kernel<SAVE, EXACT>;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, STRIP_BYTES));
    kernel<<<grid, THREADS, bytes, device_stream()>>>((bf16 *)y.data, saved, (const bf16 *)x.data,
                                                      p, a);
    LAUNCH_CHECK();
}

/* False: not supported. Without a product, *p has no steps. */
static bool prepare(Product *p, Tensor x, LoraProduct product, Attention a)
{
    *p = { NULL, NULL, {}, { STRIP_WARPS, 0 }, false, false };
    if (!product.xa.data)
        return true;
    const int rank = check_lora_matrix("rope_forward", product.m, x, product.xa);
    const LoraParts parts = lora_parts(product.m, rank, x.cols);
    for (int i = 0; i < parts.count; i++)
        if (parts.part[i].first % a.D || parts.part[i].width % a.D)
            return false;
    return choose_product(p, product.xa, product.m.w, parts, SCALE_BYTES);
}

bool rope_forward_added(bool exact, Tensor y, Tensor saved, Tensor x, LoraProduct product,
                        Attention a)
{
    const bool in_place = saved.data == x.data,
               groups = format_is_fp8(saved.format) && saved.format.group == 16;
    const bool one_pass = product.xa.data ? in_place || groups : exact && groups;
    Product p;
    if (!one_pass || x.rows == 0 || x.rows > 65535 * TOKENS || x.format.dtype != BF16 ||
        y.format.dtype != BF16 || a.D % (2 * STRIP) ||
        !halves_aligned(a, x, y, saved, Tensor{}, Tensor{}) || !prepare(&p, x, product, a))
        return false;
    check_dense("rope_forward", "y", y, x.rows, x.cols);
    const RopeShape shape = { a.rope,
                              x.rows,
                              a.T,
                              x.cols,
                              a.D,
                              a.H + 2 * a.K,
                              a.H + a.K,
                              a.D / (2 * STRIP),
                              a.clip > 0 ? a.clip : INFINITY };
    if (groups)
        check_groups("rope_forward", "saved", saved, x.rows, x.cols);
    if (groups && exact)
        launch<SAVE_GROUPS, true>(y, { .groups = group_out(saved) }, x, p, shape);
    else if (groups)
        launch<SAVE_GROUPS, false>(y, { .groups = group_out(saved) }, x, p, shape);
    else if (y.data == x.data)
        launch<SAVE_NONE, false>(y, {}, x, p, shape);
    else
        launch<SAVE_BF16, false>(y, { .data = (bf16 *)saved.data }, x, p, shape);
    return true;
}
