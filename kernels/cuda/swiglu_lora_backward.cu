/* SwiGLU's backward from the gradient of the base's GEMM plus an adapter's product. The product is
 * added on load.
 *
 * A warp has two neighbouring strips. Bytes per element of act in BF16: 10. For an FP8 gradient
 * from FP8 groups there are two passes: the first takes 4.12 to find the maximum, the second takes
 * 4.12 + 2 to write the gradient, or 4.12 + 3 with act. If the gradient's scale is reused, there is
 * only the second pass. */
#include "kernels/cuda/added.cuh"
#include "kernels/cuda/swiglu.cuh"

/* The recomputed act: BF16 values in `data`, or FP8 codes. A NULL pointer is not written. */
struct ActOut {
    bf16 *data;
    TileOut codes;
};

/* Saved values of a thread's tokens n and n + 8 in both strips. Beyond the last row or the last
 * columns, the values of the last row or the last columns are loaded again. */
template <class Reader>
struct Saved {
    typename Reader::Raw gate[2][2], up[2][2];
};

template <class Reader>
__device__ static inline void load_saved(Saved<Reader> &to, const Reader &gate_up, int n,
                                         int column, int N, int F)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const size_t at =
            (size_t)min(n + i / 2 * 8, N - 1) * 2 * F + min(column + i % 2 * STRIP, F - 8);
        to.gate[i / 2][i % 2] = gate_up.at(at);
        to.up[i / 2][i % 2] = gate_up.at(at + F);
    }
}

template <class Reader, To TO>
__global__ __launch_bounds__(ADDED_THREADS,
                             2) void swiglu_backward_added_kernel(Result out, ActOut act_out,
                                                                  const bf16 *dact, Reader gate_up,
                                                                  Product p, int N, int F)
{
    __shared__ float shared[32];
    if (is_written<TO>(out))
        return;
    const Place t(p.layout, N);
    const int c0 = blockIdx.x * t.column_warps * 2 * STRIP,
              column = c0 + t.warp * 2 * STRIP + t.eight, from = min(column, F - 8);
    const float inverse = inverse_scale<TO>(out), act_inverse = ENCODES<TO> && act_out.codes.data
                                                                    ? 1.0f / *act_out.codes.scale
                                                                    : 0.0f;
    float m = 0;
    Saved<Reader> saved;
    for_sums(
        t, p, { dact + from, N, (size_t)F, (size_t)(min(column + STRIP, F - 8) - from) }, { 0, 0 },
        [&](int i) { return strip_of(p.projections, p.projections.projection[0], c0 + STRIP * i); },
        [&](int n) { load_saved(saved, gate_up, n, column, N, F); },
        [&](int i, int token, float(&d)[2][8]) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int f = column + h * STRIP;
                const bool inside = token < t.end && f < F;
                const size_t at = (size_t)token * 2 * F + f, act_at = (size_t)token * F + f;
                float g[8], u[8], act[8];
                gate_up.values(g, saved.gate[i][h]);
                gate_up.values(u, saved.up[i][h]);
                swiglu_gradients<TO != TO_BF16>(g, u, act, d[h]);
                put<TO>(out, at, g, inverse, m, inside);
                put<TO>(out, at + F, u, inverse, m, inside);
                if (TO == TO_BF16 && act_out.data)
                    store_pack<true>(act_out.data + act_at, act, inside ? 8 : 0);
                if (ENCODES<TO> && inside && act_out.codes.data)
                    *(uint2 *)(act_out.codes.data + act_at) =
                        encode_pack(act, act_inverse, act_out.codes.dtype);
            }
        });
    if (MEASURES<TO>)
        raise_amax(out.amax, m, shared);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <To TO, class Reader>
static void launch(const Result &out, const ActOut &act, Tensor dact, Reader gate_up,
                   const Product &p)
{
    const int N = dact.rows, F = dact.cols;
    launch_added(swiglu_backward_added_kernel<Reader, TO>, p, 0, (int)ceil_div(F, 2 * STRIP), N,
                 out, act, (const bf16 *)dact.data, gate_up, p, N, F);
}

/* Finds the scale, then writes the codes. If the scale is reused, one pass does both, and a second
 * pass follows, which works only if the range was exceeded. */
template <class Reader>
static void launch_fp8(Tensor dgate_up, Tensor act, Tensor dact, Reader gate_up, const Product &p)
{
    const ActOut act_out = { NULL, tile_out(act, NULL) };
    if (scale_is_reused(dgate_up)) {
        const AmaxProbe probe = amax_probe_new();
        launch<TO_CODES_IN_RANGE>(
            { .amax = probe.amax, .codes = tile_out_in_range(dgate_up, probe) }, act_out, dact,
            gate_up, p);
        launch<TO_CODES>({ .codes = tile_out_recode(dgate_up, probe), .probe = probe }, {}, dact,
                         gate_up, p);
        return;
    }
    float *amax = amax_new();
    launch<TO_AMAX>({ .amax = amax }, {}, dact, gate_up, p);
    launch<TO_CODES>({ .codes = tile_out(dgate_up, amax) }, act_out, dact, gate_up, p);
}

/* Returns true for FP8 rows without transposes, and if all tensors are in BF16. The choice must not
 * depend on whether act is requested, because recomputation must not change gradients. */
static bool knows(Tensor dgate_up, Tensor act, Tensor dact, Tensor gate_up)
{
    const bool fp8 = format_is_fp8(dgate_up.format) && dgate_up.data && !dgate_up.data_t;
    const bool act_fits =
        !tensor_exists(act) || (fp8 ? format_is_fp8(act.format) && act.data && !act.data_t
                                    : act.format.dtype == BF16 && is_aligned(act, act.cols));
    const bool groups = format_is_fp8(gate_up.format) && gate_up.format.group == 16;
    return (fp8 || dgate_up.format.dtype == BF16) && act_fits &&
           (gate_up.format.dtype == BF16 || (fp8 && groups)) && dact.format.dtype == BF16 &&
           is_aligned(dact, dact.cols) && is_aligned(gate_up, dact.cols) &&
           is_aligned(dgate_up, dact.cols) && has_rows(dact);
}

bool swiglu_backward_added(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product,
                           Tensor gate_up)
{
    const int N = dact.rows, F = dact.cols;
    if (!product.xa.data || product.m.is_b || !knows(dgate_up, act, dact, gate_up))
        return false;
    const int rank = check_lora_matrix("swiglu_backward", product.m, dact, product.xa);
    Product p;
    if (!choose_product(&p, product.xa, product.m.w, lora_projections(product.m, rank, F), 0))
        return false;
    check_operand("swiglu_backward", "dgate_up", dgate_up, N, 2 * F);
    if (tensor_exists(act))
        check_operand("swiglu_backward", "act", act, N, F);
    const DenseReader<bf16> dense = { (const bf16 *)gate_up.data, 2 * F };
    if (gate_up.format.dtype == BF16) {
        check_dense("swiglu_backward", "gate_up", gate_up, N, 2 * F);
        if (dgate_up.format.dtype == BF16)
            launch<TO_BF16>({ .data = (bf16 *)dgate_up.data }, { (bf16 *)act.data, {} }, dact,
                            dense, p);
        else
            launch_fp8(dgate_up, act, dact, dense, p);
        return true;
    }
    check_groups("swiglu_backward", "gate_up", gate_up, N, 2 * F);
    launch_fp8(dgate_up, act, dact, group_reader(gate_up, gate_up.format.dtype), p);
    return true;
}
