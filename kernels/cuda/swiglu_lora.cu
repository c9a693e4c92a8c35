/* SwiGLU of the base's GEMM output plus an adapter's product, which is added on load: wide is read
 * once per pass, and written only if it is saved.
 *
 * A warp has a strip of gate and the same strip of up, 16 tokens at a time, with loads of the next
 * tokens in flight. Bytes per element of act: 10 in BF16; with saved FP8 groups and an FP8 act two
 * passes, 4 + 2.12 and 4 + 1, or one, 4 + 3.12, if act's range is reused. */
#include "kernels/cuda/strips.cuh"

/* ACT_IN_RANGE: both ACT_AMAX and ACT_CODES. */
enum Act { ACT_BF16, ACT_AMAX, ACT_CODES, ACT_IN_RANGE };

static constexpr int TOKENS = 256, THREADS = 32 * STRIP_WARPS;
static constexpr int SCALE_BYTES = TOKENS * 4; /* of group scales, per warp */

struct ActOut {
    bf16 *data;      /* ACT_BF16 */
    float *amax;     /* ACT_AMAX */
    TileOut codes;   /* ACT_CODES */
    AmaxProbe probe; /* of an earlier pass in range; amax NULL: none */
};

template <Act ACT>
constexpr bool MEASURES = ACT == ACT_AMAX || ACT == ACT_IN_RANGE;
template <Act ACT>
constexpr bool ENCODES = ACT == ACT_CODES || ACT == ACT_IN_RANGE;

/* The parts of B for gate and up; none: width 0, xa -1. */
struct Halves {
    LoraPart of[2];
};

/* The thread's packs of gate and of up, for tokens n and n + 8; after the end those of the last
 * row. */
__device__ static inline void load_step(Pack<bf16> (&to)[2][2], const bf16 *from, int n, int N,
                                        int F)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i / 2][i % 2] =
            load_pack<true>(from + (size_t)min(n + i / 2 * 8, N - 1) * 2 * F + i % 2 * F, 8);
}

/* Computes act from gate and up, and stores or measures it; m: the largest so far. */
template <Act ACT>
__device__ static inline void put_act(const ActOut &out, size_t at, const float (&gate)[8],
                                      const float (&up)[8], float inverse, float &m, bool inside)
{
    float act[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        act[k] = gate[k] * (ACT == ACT_BF16 ? sigmoid(gate[k]) : quick_sigmoid(gate[k])) * up[k];
    if (ACT == ACT_BF16)
        store_pack<true>(out.data + at, act, inside ? 8 : 0);
    if (MEASURES<ACT>)
        m = inside ? fmaxf(m, pack_abs_max(act)) : m;
    if (ENCODES<ACT> && inside)
        *(uint2 *)(out.codes.data + at) = encode_pack(act, inverse, out.codes.dtype);
}

/* EXACT: act is computed from the sums, not from saved values. */
template <Save SAVE, Act ACT, bool EXACT>
__global__ __launch_bounds__(THREADS, 3) void swiglu_added_kernel(ActOut act, SaveOut saved,
                                                                  const bf16 *wide, Product p,
                                                                  Halves halves, int N, int F)
{
    extern __shared__ uint4 packs[];
    __shared__ float shared[32];
    const int column_warps = p.layout.column_warps, packs_each = p.layout.steps * 4 * 32;
    uint8_t *scales = (uint8_t *)(packs + column_warps * packs_each);
    if (ACT == ACT_CODES && act.probe.amax && was_in_range(act.codes, act.probe))
        return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % column_warps,
              group = threadIdx.x / 32 / column_warps;
    const int f0 = blockIdx.x * column_warps * STRIP, f = f0 + warp * STRIP + lane % 4 * 8;
    const int first = blockIdx.y * TOKENS, end = min(N, first + TOKENS),
              step = 16 * (STRIP_WARPS / column_warps);
    const int xa[2] = { halves.of[0].xa, halves.of[1].xa };
    const bf16 *from = wide + min(f, F - 8);
    const float inverse =
        ENCODES<ACT> ? 1.0f / tile_scale(act.codes, *tile_scale_from(act.codes)) : 0.0f;
    float m = 0;
    int n = first + 16 * group + lane / 4;
    Pack<bf16> next[2][2];
    load_step(next, from, n, N, F);
    hold_matrix(packs, p, [&](int i) {
        return strip_of(p.parts, i % 2 ? halves.of[1] : halves.of[0], f0 + i / 2 * STRIP);
    });
    __syncthreads();
    for (; n - lane / 4 < end; n += step) {
        float sum[1][8][4];
#pragma unroll
        for (int i = 0; i < 32; i++)
            strip_element(sum, i / 16, i / 8 % 2, i % 8) = next[i / 16][i / 8 % 2][i % 8];
        if (n - lane / 4 + step < end)
            load_step(next, from, n + step, N, F);
        add_product(sum, packs + warp * packs_each + lane, p, xa, n, end);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = n + 8 * i;
            const bool inside = token < end && f < F;
            uint8_t *scale = scales + (token - first) * 4 * column_warps + 4 * warp + lane % 4 / 2;
            float x[2][8], s[2][8];
#pragma unroll
            for (int k = 0; k < 16; k++)
                x[k / 8][k % 8] = s[k / 8][k % 8] = strip_element(sum, i, k / 8, k % 8);
#pragma unroll
            for (int h = 0; h < 2; h++)
                save_values<SAVE>(saved, (size_t)token * 2 * F + h * F + f, s[h], scale + 2 * h,
                                  inside);
            put_act<ACT>(act, (size_t)token * F + f, EXACT ? x[0] : s[0], EXACT ? x[1] : s[1],
                         inverse, m, inside);
        }
    }
    if (SAVE == SAVE_GROUPS)
        store_scales(saved, scales, column_warps, first, end, 2 * F, [&](int slot) {
            const int c = f0 + slot / 4 * STRIP + slot % 2 * 16;
            return c < F ? slot / 2 % 2 * F + c : -1;
        });
    if (MEASURES<ACT>)
        raise_amax(act.amax, m, shared);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* False: not supported. */
static bool prepare(Product *p, Halves *halves, Tensor wide, LoraProduct product)
{
    if (!product.xa.data || wide.rows == 0 || wide.format.dtype != BF16)
        return false;
    const int F = wide.cols / 2,
              rank = check_lora_matrix("swiglu_forward", product.m, wide, product.xa);
    const LoraParts parts = lora_parts(product.m, rank, wide.cols);
    for (int h = 0; h < 2; h++)
        halves->of[h] = { 0, 0, -1, 0, 0 };
    for (int i = 0; i < parts.count; i++) {
        if (parts.part[i].width != F || parts.part[i].first % F)
            return false;
        halves->of[parts.part[i].first / F] = parts.part[i];
    }
    return is_aligned(wide, F) && wide.rows <= 65535 * TOKENS &&
           choose_product(p, product.xa, product.m.w, parts, SCALE_BYTES);
}

template <Save SAVE, Act ACT, bool EXACT>
static void launch(ActOut act, SaveOut saved, Tensor wide, const Product &p, const Halves &halves)
{
    const int N = wide.rows, F = wide.cols / 2, bytes = strip_bytes(p.layout, SCALE_BYTES);
    const dim3 grid((unsigned)ceil_div(F, p.layout.column_warps * STRIP),
                    (unsigned)ceil_div(N, TOKENS));
    const auto kernel = swiglu_added_kernel<SAVE, ACT, EXACT>;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, STRIP_BYTES));
    kernel<<<grid, THREADS, bytes, device_stream()>>>(act, saved, (const bf16 *)wide.data, p,
                                                      halves, N, F);
    LAUNCH_CHECK();
}

bool swiglu_added(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product)
{
    Product p;
    Halves halves;
    if (gate_up.data != wide.data || act.format.dtype != BF16 || !is_aligned(act, act.cols) ||
        !prepare(&p, &halves, wide, product))
        return false;
    launch<SAVE_BF16, ACT_BF16, false>({ .data = (bf16 *)act.data }, { .data = (bf16 *)wide.data },
                                       wide, p, halves);
    return true;
}

bool swiglu_save_added(AmaxProbe probe, Tensor act, Tensor gate_up, Tensor wide,
                       LoraProduct product, bool exact)
{
    Product p;
    Halves halves;
    const bool saves = gate_up.data != wide.data, rows_alone = act.data && !act.data_t;
    if ((saves && exact && !rows_alone) || !prepare(&p, &halves, wide, product))
        return false;
    const ActOut measured = { .amax = probe.amax };
    const ActOut in_range = { .amax = probe.amax, .codes = tile_out_in_range(act, probe) };
    const SaveOut groups = { .groups = group_out(gate_up) };
    if (!saves)
        launch<SAVE_BF16, ACT_AMAX, false>(measured, { .data = (bf16 *)wide.data }, wide, p,
                                           halves);
    else if (probe.scale_amax && exact)
        launch<SAVE_GROUPS, ACT_IN_RANGE, true>(in_range, groups, wide, p, halves);
    else if (probe.scale_amax)
        launch<SAVE_GROUPS, ACT_IN_RANGE, false>(in_range, groups, wide, p, halves);
    else if (exact)
        launch<SAVE_GROUPS, ACT_AMAX, true>(measured, groups, wide, p, halves);
    else
        launch<SAVE_GROUPS, ACT_AMAX, false>(measured, groups, wide, p, halves);
    return true;
}

void swiglu_codes_added(Tensor act, AmaxProbe probe, Tensor wide, LoraProduct product)
{
    Product p;
    Halves halves;
    if (!prepare(&p, &halves, wide, product))
        die("swiglu_codes_added: called although swiglu_save_added returned false");
    const ActOut measured = { .codes = tile_out(act, probe.amax) };
    const ActOut recode = { .codes = tile_out_recode(act, probe), .probe = probe };
    launch<SAVE_NONE, ACT_CODES, true>(probe.scale_amax ? recode : measured, {}, wide, p, halves);
}
