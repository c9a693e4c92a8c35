/* Forward and backward of silu(gate) * up. Each block has one row, and each thread has PACKS packs
 * of gate and of up in flight.
 *
 * Bytes per element of act in BF16: forward takes 6 (gate, up, act), and 4 more if gate_up is not
 * the memory of wide. Backward takes 10 (gate, up, dact, dgate, dup), or 12 with act. A thread
 * reads element i of its inputs before it writes element i of its outputs, so outputs may be the
 * memory of inputs. */
#include "kernels/cuda/lora.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/vector.cuh"

enum { PACKS = 4, MAX_THREADS = 512 };

/* stored.data NULL: gate_up is the memory of wide, so gate and up are not stored again. */
template <typename T>
__global__ __launch_bounds__(MAX_THREADS) void swiglu_forward_kernel(AnyOut act, AnyOut stored,
                                                                     const T *wide, int F)
{
    const size_t row = (size_t)blockIdx.x * F;
    const T *gate = wide + 2 * row, *up = gate + F;
    for (int first = 8 * threadIdx.x; first < F; first += 8 * PACKS * blockDim.x) {
        Pack<T> g[PACKS], u[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int f = first + 8 * j * blockDim.x;
            g[j] = load_pack(gate + f, F - f);
            u[j] = load_pack(up + f, F - f);
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int f = first + 8 * j * blockDim.x;
            float gx[8], ux[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                gx[i] = as_stored(stored, g[j], i), ux[i] = as_stored(stored, u[j], i);
            if (stored.data) {
                store_any(stored, 2 * row + f, gx, F - f);
                store_any(stored, 2 * row + F + f, ux, F - f);
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                gx[i] = gx[i] * sigmoid(gx[i]) * ux[i];
            store_any(act, row + f, gx, F - f);
        }
    }
}

void backend_swiglu_forward(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product,
                            ForwardSource from)
{
    const int N = act.rows, F = act.cols;
    const bool exact =
        from == FROM_EXACT && format_is_fp8(act.format) && format_is_fp8(gate_up.format);
    if (from == FROM_EXACT && !exact) {
        if (product.xa.data)
            backend_lora_widen(wide, product.xa, product.m, wide);
        backend_quantize(gate_up, wide);
        gate_up = wide;
        product = {};
    }
    if (format_is_fp8(act.format)) {
        swiglu_forward_fp8(act, gate_up, wide, product, exact);
        return;
    }
    CHECK_DENSE(act, N, F);
    CHECK_DENSE(gate_up, N, 2 * F);
    CHECK_DENSE(wide, N, 2 * F);
    AnyOut stored = any_out(gate_up);
    if (gate_up.data == wide.data) {
        CHECK(format_equal(gate_up.format, wide.format),
              "swiglu_forward: gate_up is %s, and wide, in the same memory, is %s; expected the "
              "same format",
              format_name(gate_up.format), format_name(wide.format));
        stored.data = NULL;
    }
    if (N == 0 || swiglu_added(act, gate_up, wide, product))
        return;
    if (product.xa.data)
        backend_lora_widen(wide, product.xa, product.m, wide);
    check_aligned(OPERATION, F, act, gate_up, wide);
    with_type(wide, [&](auto *in) {
        const int threads = round_threads((int)ceil_div(F, 8), PACKS, MAX_THREADS);
        swiglu_forward_kernel<<<N, threads, 0, device_stream()>>>(any_out(act), stored, in, F);
    });
    LAUNCH_CHECK();
}

/* act.data is NULL if act is not written. */
template <typename TD, typename T>
__global__ __launch_bounds__(MAX_THREADS) void swiglu_backward_kernel(AnyOut dgate_up, AnyOut act,
                                                                      const TD *dact,
                                                                      const T *gate_up, int F)
{
    enum { EACH = PACKS / 2 };
    const size_t row = (size_t)blockIdx.x * F;
    const T *gate = gate_up + 2 * row, *up = gate + F;
    for (int first = 8 * threadIdx.x; first < F; first += 8 * EACH * blockDim.x) {
        Pack<T> g[EACH], u[EACH];
        Pack<TD> d[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int f = first + 8 * j * blockDim.x;
            g[j] = load_pack(gate + f, F - f);
            u[j] = load_pack(up + f, F - f);
            d[j] = load_pack(dact + row + f, F - f);
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int f = first + 8 * j * blockDim.x;
            float dgate[8], dup[8], recomputed[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float s = sigmoid(g[j][i]), gs = g[j][i] * s;
                dgate[i] = d[j][i] * u[j][i] * s * (1.0f + g[j][i] * (1.0f - s));
                dup[i] = d[j][i] * gs;
                recomputed[i] = gs * u[j][i];
            }
            store_any(dgate_up, 2 * row + f, dgate, F - f);
            store_any(dgate_up, 2 * row + F + f, dup, F - f);
            if (act.data)
                store_any(act, row + f, recomputed, F - f);
        }
    }
}

void backend_swiglu_backward(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product,
                             Tensor gate_up)
{
    const int N = dact.rows, F = dact.cols;
    CHECK_DENSE(dact, N, F);
    if (swiglu_backward_added(dgate_up, act, dact, product, gate_up))
        return;
    if (product.xa.data)
        backend_lora_widen(dact, product.xa, product.m, dact);
    if (format_is_fp8(dgate_up.format)) {
        swiglu_backward_fp8(dgate_up, act, dact, gate_up);
        return;
    }
    CHECK_DENSE(gate_up, N, 2 * F);
    CHECK_DENSE(dgate_up, N, 2 * F);
    CHECK_DENSE_OPTIONAL(act, N, F);
    CHECK(dgate_up.data != gate_up.data || format_equal(dgate_up.format, gate_up.format),
          "swiglu_backward: dgate_up and gate_up share memory but have different formats");
    CHECK(act.data != dact.data || format_equal(act.format, dact.format),
          "swiglu_backward: act and dact share memory but have different formats");
    if (N == 0)
        return;
    check_aligned(OPERATION, F, dgate_up, act, dact, gate_up);
    with_type(dact, [&](auto *d) {
        with_type(gate_up, [&](auto *in) {
            const int threads = round_threads((int)ceil_div(F, 8), PACKS / 2, MAX_THREADS);
            swiglu_backward_kernel<<<N, threads, 0, device_stream()>>>(any_out(dgate_up),
                                                                       any_out(act), d, in, F);
        });
    });
    LAUNCH_CHECK();
}
