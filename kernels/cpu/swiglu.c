/* SwiGLU [Shazeer 2020]: act = silu(g) u with silu(g) = g s, s = 1/(1 + exp(-g)).
 *
 *     d act/du = g s        d act/dg = u (s + g s') = u s (1 + g (1 - s)), since s' = s (1 - s) */
#include <math.h>

#include "kernels/cpu/cpu.h"

float sigmoid(float x)
{
    return 1 / (1 + expf(-x));
}

/* gate_up = wide + product. */
static void save(Tensor gate_up, Tensor wide, LoraProduct product)
{
    if (product.xa.data)
        backend_lora_widen(wide, product.xa, product.m, wide);
    backend_quantize(gate_up, wide);
}

/* Computes act from gate and up, the two halves of each row of x. */
static void activate(Tensor act, Tensor x)
{
    const int N = act.rows, F = act.cols;
    const float *input = tensor_values(x, 0);
    float *output = tensor_result(act, 1);
    for (int n = 0; n < N; n++) {
        const float *gate = input + (size_t)n * 2 * (size_t)F, *up = gate + F;
        for (int f = 0; f < F; f++)
            output[(size_t)n * (size_t)F + f] = gate[f] * sigmoid(gate[f]) * up[f];
    }
    channels_apply(act, output);
    tensor_finish(act, output);
}

void backend_swiglu_forward(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product,
                            ForwardSource from)
{
    CHECK_TENSOR(act, act.rows, act.cols);
    CHECK_TENSOR(gate_up, act.rows, 2 * act.cols);
    CHECK_TENSOR(wide, act.rows, 2 * act.cols);
    save(gate_up, wide, product);
    activate(act, from == FROM_EXACT ? wide : gate_up);
}

void backend_matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w)
{
    backend_matmul(wide, x, w, (Tensor){ 0 });
    backend_swiglu_forward(act, gate_up, wide, (LoraProduct){ 0 }, FROM_EXACT);
}

void backend_matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
                              Tensor gate_up)
{
    backend_matmul_dx(dact, dy, w, false);
    backend_swiglu_backward(dgate_up, act, dact, (LoraProduct){ 0 }, gate_up);
}

void backend_swiglu_backward(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product,
                             Tensor gate_up)
{
    const int N = dact.rows, F = dact.cols;
    CHECK_TENSOR(dact, N, F);
    CHECK_TENSOR(gate_up, N, 2 * F);
    CHECK_TENSOR(dgate_up, N, 2 * F);
    CHECK(!tensor_exists(act) || (act.rows == N && act.cols == F),
          "swiglu_backward: act is (%d, %d)", act.rows, act.cols);
    if (product.xa.data)
        backend_lora_widen(dact, product.xa, product.m, dact);
    const float *gradient = tensor_values(dact, 0), *input = tensor_values(gate_up, 1);
    float *output = tensor_result(dgate_up, 2), *recomputed = NULL;
    if (tensor_exists(act))
        recomputed = tensor_result(act, 3);
    for (int n = 0; n < N; n++) {
        const size_t wide = (size_t)n * 2 * (size_t)F, narrow = (size_t)n * (size_t)F;
        for (int f = 0; f < F; f++) {
            const float g = input[wide + f], u = input[wide + F + f], d = gradient[narrow + f],
                        s = sigmoid(g);
            output[wide + f] = d * u * s * (1 + g * (1 - s));
            output[wide + F + f] = d * g * s;
            if (recomputed)
                recomputed[narrow + f] = g * s * u;
        }
    }
    tensor_finish(dgate_up, output);
    if (recomputed) {
        channels_multiply(act, recomputed);
        tensor_finish_scaled(act, recomputed);
    }
}
