/* The rotation in one pass with the steps before it: adding an adapter's product to the output of
 * the base's GEMM, and saving q, k and v in FP8 groups. There are no norms.
 *
 * A warp's two strips have the same columns of the first half and of the second half of a head.
 * Bytes per element: 2 read, 2 written, 1.06 for FP8 groups. The tables of angles are read from L1
 * and L2. */
#include "kernels/cuda/added.cuh"
#include "kernels/cuda/rope.cuh"

struct RopeShape {
    const float *rope; /* (T, D/2, 2) */
    int N, T, S, D;
    int heads, rotated; /* heads: number for q, k and v; rotated: number for q and k */
    int strips;         /* strips per half head */
    float clip;         /* INFINITY: no clamp */
};

/* Returns the first column of strip h of pair number `pair` in a row; -1: the pair is after the
 * row. */
__device__ static inline int pair_column(const RopeShape &a, int pair, int h)
{
    const int head = pair / a.strips;
    return head < a.heads ? head * a.D + h * (a.D / 2) + pair % a.strips * STRIP : -1;
}

/* Returns the projection of B that contains this column; projections are whole heads. If there is
 * no such projection, its width is 0 and its xa is -1. */
__device__ static inline LoraProjection projection_at(const LoraProjections &projections,
                                                      int column)
{
    LoraProjection found = { 0, 0, -1, 0, 0 };
#pragma unroll
    for (int i = 0; i < LORA_PROJECTIONS; i++)
        if (i < projections.count && column >= projections.projection[i].first &&
            column < projections.projection[i].first + projections.projection[i].width)
            found = projections.projection[i];
    return found;
}

/* Clamps u and v, and rotates them if `rotates`. angles: eight cosines and sines. */
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

/* EXACT: y is computed from the sums, not from saved values. x and y may be the same memory. A BF16
 * `saved` may also be this memory. */
template <Save SAVE, bool EXACT>
__global__ __launch_bounds__(ADDED_THREADS, 3) void rope_added_kernel(bf16 *y, SaveOut saved,
                                                                      const bf16 *x, Product p,
                                                                      RopeShape a)
{
    const Place t(p.layout, a.N);
    const int pair0 = blockIdx.x * t.column_warps, strip = pair_column(a, pair0 + t.warp, 0),
              half = a.D / 2, column = max(strip, 0) + t.eight, angle = column % a.D,
              xa = projection_at(p.projections, strip).xa;
    const bool rotates = strip < a.rotated * a.D;
    uint8_t *scales = held_scales(p);
    for_sums(
        t, p, { x + column, a.N, (size_t)a.S, (size_t)half }, { xa, xa },
        [&](int i) {
            const int c = pair_column(a, pair0 + i / 2, i % 2);
            const LoraProjection projection = projection_at(p.projections, c);
            return c < 0 ? Strip{ 0, 0 }
                         : strip_of(p.projections, projection, c - projection.first);
        },
        [](int) {},
        [&](int, int token, float(&v)[2][8]) {
            const bool inside = token < t.end && strip >= 0;
            const size_t at = (size_t)token * a.S + column;
            save_token<SAVE, EXACT>(saved, scales, t, token, at, half, v, inside);
            rotate_packs(v[0], v[1],
                         (const float4 *)(a.rope + (size_t)(token % a.T) * a.D + 2 * angle),
                         rotates, a.clip);
            store_pack<true>(y + at, v[0], inside ? 8 : 0);
            store_pack<true>(y + at + half, v[1], inside ? 8 : 0);
        });
    if (SAVE == SAVE_GROUPS)
        store_scales(saved, scales, t, a.S, [&](int slot) {
            const int c = pair_column(a, pair0 + slot / 4, slot / 2 % 2);
            return c < 0 ? c : c + slot % 2 * 16;
        });
}

/* ---- launches -------------------------------------------------------------------------------- */

template <Save SAVE, bool EXACT>
static void launch(Tensor y, SaveOut saved, Tensor x, const Product &p, const RopeShape &a)
{
    launch_added(rope_added_kernel<SAVE, EXACT>, p, SCALE_BYTES, a.heads * a.strips, a.N,
                 (bf16 *)y.data, saved, (const bf16 *)x.data, p, a);
}

/* Returns false if the case is not supported. Without a product, *p has no steps. */
static bool prepare(Product *p, Tensor x, LoraProduct product, Attention a)
{
    *p = { NULL, NULL, {}, { STRIP_WARPS, 0 }, false, false };
    if (!product.xa.data)
        return true;
    const int rank = check_lora_matrix("rope_forward", product.m, x, product.xa);
    const LoraProjections projections = lora_projections(product.m, rank, x.cols);
    for (int i = 0; i < projections.count; i++)
        if (projections.projection[i].first % a.D || projections.projection[i].width % a.D)
            return false;
    return choose_product(p, product.xa, product.m.w, projections, SCALE_BYTES);
}

bool rope_forward_added(bool exact, Tensor y, Tensor saved, Tensor x, LoraProduct product,
                        Attention a)
{
    const bool in_place = saved.data == x.data,
               groups = format_is_fp8(saved.format) && saved.format.group == 16;
    const bool one_pass = product.xa.data ? in_place || groups : exact && groups;
    Product p;
    if (!one_pass || !has_rows(x) || x.format.dtype != BF16 || y.format.dtype != BF16 ||
        a.D % (2 * STRIP) || !halves_aligned(a, x, y, saved, Tensor{}, Tensor{}) ||
        !prepare(&p, x, product, a))
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
