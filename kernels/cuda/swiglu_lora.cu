/* SwiGLU of the base's GEMM output plus an adapter's product. The product is added on load. So wide
 * is read once per pass, and written only if it is saved.
 *
 * A warp's two strips have the same columns of gate and of up. Bytes per element of act in BF16:
 * 10. With gate_up saved in FP8 groups and an FP8 act there are two passes, 4 + 2.12 and 4 + 1, or
 * one pass, 4 + 3.12, if the scale of act is reused. */
#include "kernels/cuda/added.cuh"

/* The projections of B for gate and up. If a projection is missing, its width is 0 and its xa is
 * -1. */
struct Halves {
    LoraProjection of[2];
};

/* EXACT: act is computed from the sums, not from saved values. */
template <Save SAVE, To TO, bool EXACT>
__global__ __launch_bounds__(ADDED_THREADS, 3) void swiglu_added_kernel(Result act, SaveOut saved,
                                                                        const bf16 *wide, Product p,
                                                                        Halves halves, int N, int F)
{
    __shared__ float shared[32];
    if (is_written<TO>(act))
        return;
    const Place t(p.layout, N);
    const int f0 = blockIdx.x * t.column_warps * STRIP, f = f0 + t.warp * STRIP + t.eight;
    const float inverse = inverse_scale<TO>(act);
    uint8_t *scales = held_scales(p);
    float m = 0;
    for_sums(
        t, p, { wide + min(f, F - 8), N, 2 * (size_t)F, (size_t)F },
        { halves.of[0].xa, halves.of[1].xa },
        [&](int i) {
            return strip_of(p.projections, i % 2 ? halves.of[1] : halves.of[0], f0 + i / 2 * STRIP);
        },
        [](int) {},
        [&](int, int token, float(&v)[2][8]) {
            const bool inside = token < t.end && f < F;
            float y[8];
            save_token<SAVE, EXACT>(saved, scales, t, token, (size_t)token * 2 * F + f, F, v,
                                    inside);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float gate = v[0][k];
                y[k] = gate * (TO == TO_BF16 ? sigmoid(gate) : quick_sigmoid(gate)) * v[1][k];
            }
            put<TO>(act, (size_t)token * F + f, y, inverse, m, inside);
        });
    if (SAVE == SAVE_GROUPS)
        store_scales(saved, scales, t, 2 * F, [&](int slot) {
            const int c = f0 + slot / 4 * STRIP + slot % 2 * 16;
            return c < F ? slot / 2 % 2 * F + c : -1;
        });
    if (MEASURES<TO>)
        raise_amax(act.amax, m, shared);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Returns false if the case is not supported. */
static bool prepare(Product *p, Halves *halves, Tensor wide, LoraProduct product)
{
    if (!product.xa.data || !has_rows(wide) || wide.format.dtype != BF16)
        return false;
    const int F = wide.cols / 2,
              rank = check_lora_matrix("swiglu_forward", product.m, wide, product.xa);
    const LoraProjections projections = lora_projections(product.m, rank, wide.cols);
    for (int h = 0; h < 2; h++)
        halves->of[h] = { 0, 0, -1, 0, 0 };
    for (int i = 0; i < projections.count; i++) {
        if (projections.projection[i].width != F || projections.projection[i].first % F)
            return false;
        halves->of[projections.projection[i].first / F] = projections.projection[i];
    }
    return is_aligned(wide, F) &&
           choose_product(p, product.xa, product.m.w, projections, SCALE_BYTES);
}

template <Save SAVE, To TO, bool EXACT>
static void launch(Result act, SaveOut saved, Tensor wide, const Product &p, const Halves &halves)
{
    const int F = wide.cols / 2;
    launch_added(swiglu_added_kernel<SAVE, TO, EXACT>, p, SCALE_BYTES, (int)ceil_div(F, STRIP),
                 wide.rows, act, saved, (const bf16 *)wide.data, p, halves, wide.rows, F);
}

bool swiglu_added(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product)
{
    Product p;
    Halves halves;
    if (gate_up.data != wide.data || act.format.dtype != BF16 || !is_aligned(act, act.cols) ||
        !prepare(&p, &halves, wide, product))
        return false;
    launch<SAVE_BF16, TO_BF16, false>({ .data = (bf16 *)act.data }, { .data = (bf16 *)wide.data },
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
    const Result measured = { .amax = probe.amax };
    const Result in_range = { .amax = probe.amax, .codes = tile_out_in_range(act, probe) };
    const SaveOut groups = { .groups = group_out(gate_up) };
    if (!saves)
        launch<SAVE_BF16, TO_AMAX, false>(measured, { .data = (bf16 *)wide.data }, wide, p, halves);
    else if (probe.scale_amax && exact)
        launch<SAVE_GROUPS, TO_CODES_IN_RANGE, true>(in_range, groups, wide, p, halves);
    else if (probe.scale_amax)
        launch<SAVE_GROUPS, TO_CODES_IN_RANGE, false>(in_range, groups, wide, p, halves);
    else if (exact)
        launch<SAVE_GROUPS, TO_AMAX, true>(measured, groups, wide, p, halves);
    else
        launch<SAVE_GROUPS, TO_AMAX, false>(measured, groups, wide, p, halves);
    return true;
}

void swiglu_codes_added(Tensor act, AmaxProbe probe, Tensor wide, LoraProduct product)
{
    Product p;
    Halves halves;
    if (!prepare(&p, &halves, wide, product))
        die("swiglu_codes_added: called although swiglu_save_added returned false");
    const Result measured = { .codes = tile_out(act, probe.amax) };
    const Result recode = { .codes = tile_out_recode(act, probe), .probe = probe };
    launch<SAVE_NONE, TO_CODES, true>(probe.scale_amax ? recode : measured, {}, wide, p, halves);
}
