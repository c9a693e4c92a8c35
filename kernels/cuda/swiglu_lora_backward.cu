/* SwiGLU's backward from the gradient of the base's GEMM plus an adapter's product, which is added
 * on load.
 *
 * A warp has two neighbouring strips, 16 tokens at a time, with loads of the next gradients in
 * flight. Bytes per element of act: 10 in BF16; for an FP8 gradient from FP8 groups two passes,
 * 4.12 for its maximum and 4.12 + 2 to write it, or + 3 with act; only the second if its scale is
 * reused. */
#include "kernels/cuda/strips.cuh"
#include "kernels/cuda/swiglu.cuh"

/* OUT_IN_RANGE: both OUT_AMAX and OUT_CODES. */
enum Out { OUT_BF16, OUT_AMAX, OUT_CODES, OUT_IN_RANGE };

static constexpr int TOKENS = 256, THREADS = 32 * STRIP_WARPS;

struct Gradient {
    bf16 *data, *plain_act; /* OUT_BF16; plain_act may be NULL, as act.data: not written */
    float *amax;            /* OUT_AMAX */
    TileOut codes, act;     /* OUT_CODES */
    AmaxProbe probe;        /* of an earlier pass in range; amax NULL: none */
};

template <Out OUT>
constexpr bool MEASURES = OUT == OUT_AMAX || OUT == OUT_IN_RANGE;
template <Out OUT>
constexpr bool ENCODES = OUT == OUT_CODES || OUT == OUT_IN_RANGE;

/* A thread's loads for tokens n and n + 8, in both strips: gradients, one iteration ahead, and
 * saved values; after the end those of the last row and the last columns. */
__device__ static inline void load_gradients(Pack<bf16> (&to)[2][2], const bf16 *dact, int n,
                                             int column, int N, int F)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i / 2][i % 2] = load_pack<true>(
            dact + (size_t)min(n + i / 2 * 8, N - 1) * F + min(column + i % 2 * STRIP, F - 8), 8);
}

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

template <class Reader, Out OUT>
__global__ __launch_bounds__(THREADS, 2) void swiglu_backward_added_kernel(Gradient out,
                                                                           const bf16 *dact,
                                                                           Reader gate_up,
                                                                           Product p, int N, int F)
{
    extern __shared__ uint4 packs[];
    __shared__ float shared[32];
    const int column_warps = p.layout.column_warps, packs_each = p.layout.steps * 4 * 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % column_warps,
              group = threadIdx.x / 32 / column_warps;
    const int c0 = blockIdx.x * column_warps * 2 * STRIP,
              column = c0 + warp * 2 * STRIP + lane % 4 * 8;
    const int first = blockIdx.y * TOKENS, end = min(N, first + TOKENS),
              step = 16 * (STRIP_WARPS / column_warps);
    const int xa[2] = { 0, 0 };
    if (OUT == OUT_CODES && out.probe.amax && was_in_range(out.codes, out.probe))
        return;
    const float inverse =
        ENCODES<OUT> ? 1.0f / tile_scale(out.codes, *tile_scale_from(out.codes)) : 0.0f;
    const float act_inverse = ENCODES<OUT> && out.act.data ? 1.0f / *out.act.scale : 0.0f;
    float m = 0;
    int n = first + 16 * group + lane / 4;
    Pack<bf16> next[2][2];
    load_gradients(next, dact, n, column, N, F);
    hold_matrix(packs, p,
                [&](int i) { return strip_of(p.parts, p.parts.part[0], c0 + STRIP * i); });
    __syncthreads();
    for (; n - lane / 4 < end; n += step) {
        Saved<Reader> saved;
        float sum[1][8][4];
        load_saved(saved, gate_up, n, column, N, F);
#pragma unroll
        for (int i = 0; i < 32; i++)
            strip_element(sum, i / 16, i / 8 % 2, i % 8) = next[i / 16][i / 8 % 2][i % 8];
        if (n - lane / 4 + step < end)
            load_gradients(next, dact, n + step, column, N, F);
        add_product(sum, packs + warp * packs_each + lane, p, xa, n, end);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = n + i / 2 * 8, f = column + i % 2 * STRIP;
            const bool inside = token < end && f < F;
            const size_t at = (size_t)token * 2 * F + f;
            float d[8], g[8], u[8], act[8];
#pragma unroll
            for (int k = 0; k < 8; k++)
                d[k] = strip_element(sum, i / 2, i % 2, k);
            gate_up.values(g, saved.gate[i / 2][i % 2]);
            gate_up.values(u, saved.up[i / 2][i % 2]);
            swiglu_gradients<OUT != OUT_BF16>(g, u, act, d);
            if (OUT == OUT_BF16) {
                store_pack<true>(out.data + at, g, inside ? 8 : 0);
                store_pack<true>(out.data + at + F, u, inside ? 8 : 0);
                if (out.plain_act)
                    store_pack<true>(out.plain_act + (size_t)token * F + f, act, inside ? 8 : 0);
            }
            if (MEASURES<OUT>)
                m = inside ? fmaxf(m, fmaxf(pack_abs_max(g), pack_abs_max(u))) : m;
            if (ENCODES<OUT> && inside) {
                *(uint2 *)(out.codes.data + at) = encode_pack(g, inverse, out.codes.dtype);
                *(uint2 *)(out.codes.data + at + F) = encode_pack(u, inverse, out.codes.dtype);
                if (out.act.data)
                    *(uint2 *)(out.act.data + (size_t)token * F + f) =
                        encode_pack(act, act_inverse, out.act.dtype);
            }
        }
    }
    if (MEASURES<OUT>)
        raise_amax(out.amax, m, shared);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <Out OUT, class Reader>
static void launch(const Gradient &out, Tensor dact, Reader gate_up, const Product &p)
{
    const int N = dact.rows, F = dact.cols;
    const dim3 grid((unsigned)ceil_div(F, p.layout.column_warps * 2 * STRIP),
                    (unsigned)ceil_div(N, TOKENS));
    const auto kernel = swiglu_backward_added_kernel<Reader, OUT>;
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, STRIP_BYTES));
    kernel<<<grid, THREADS, strip_bytes(p.layout, 0), device_stream()>>>(
        out, (const bf16 *)dact.data, gate_up, p, N, F);
    LAUNCH_CHECK();
}

/* The scale, then the codes; or both in one pass if the scale is reused, and a second pass if it
 * was exceeded. */
template <class Reader>
static void launch_fp8(Tensor dgate_up, Tensor act, Tensor dact, Reader gate_up, const Product &p)
{
    const TileOut act_out = tile_out(act, NULL);
    if (scale_is_reused(dgate_up)) {
        const AmaxProbe probe = amax_probe_new();
        launch<OUT_IN_RANGE>(
            { .amax = probe.amax, .codes = tile_out_in_range(dgate_up, probe), .act = act_out },
            dact, gate_up, p);
        launch<OUT_CODES>({ .codes = tile_out_recode(dgate_up, probe), .probe = probe }, dact,
                          gate_up, p);
        return;
    }
    float *amax = amax_new();
    launch<OUT_AMAX>({ .amax = amax }, dact, gate_up, p);
    launch<OUT_CODES>({ .codes = tile_out(dgate_up, amax), .act = act_out }, dact, gate_up, p);
}

/* Rows of FP8 without transposes, or all in BF16. The choice must not depend on whether act is
 * requested: recomputation must not change gradients. */
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
           is_aligned(dgate_up, dact.cols) && dact.rows > 0 && dact.rows <= 65535 * TOKENS;
}

bool swiglu_backward_added(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product,
                           Tensor gate_up)
{
    const int N = dact.rows, F = dact.cols;
    if (!product.xa.data || product.m.is_b || !knows(dgate_up, act, dact, gate_up))
        return false;
    const int rank = check_lora_matrix("swiglu_backward", product.m, dact, product.xa);
    Product p;
    if (!choose_product(&p, product.xa, product.m.w, lora_parts(product.m, rank, F), 0))
        return false;
    check_operand("swiglu_backward", "dgate_up", dgate_up, N, 2 * F);
    if (tensor_exists(act))
        check_operand("swiglu_backward", "act", act, N, F);
    const DenseReader<bf16> dense = { (const bf16 *)gate_up.data, 2 * F };
    if (gate_up.format.dtype == BF16) {
        check_dense("swiglu_backward", "gate_up", gate_up, N, 2 * F);
        if (dgate_up.format.dtype == BF16)
            launch<OUT_BF16>({ .data = (bf16 *)dgate_up.data, .plain_act = (bf16 *)act.data }, dact,
                             dense, p);
        else
            launch_fp8(dgate_up, act, dact, dense, p);
        return true;
    }
    check_groups("swiglu_backward", "gate_up", gate_up, N, 2 * F);
    const GroupReader<DType, Known<4>> groups = { (const uint8_t *)gate_up.data,
                                                  (const uint8_t *)gate_up.scale,
                                                  gate_up.format.dtype,
                                                  {},
                                                  2 * F };
    launch_fp8(dgate_up, act, dact, groups, p);
    return true;
}
