/* SwiGLU that reads or writes FP8.
 *
 * Forward in COAT takes two passes. A pass over rows stores gate and up in FP8 groups and finds the
 * maximum of act, which is computed from the stored values. A pass over tiles writes act and its
 * transpose. Bytes per element of act: 4 + 2.12 in the first pass, 2.12 + 2 in the second. If the
 * scale of act is reused and act has no transpose, the pass over rows writes act, at 4 + 2.12 + 1
 * bytes. If act has column factors, the pass over tiles always writes act. In this case, unless the
 * scale of act is reused, another pass first finds the maxima of columns, at 2.12 bytes or, if
 * EXACT, 4 bytes. Backward takes a pass for the maximum of the gradients, unless their scale is
 * reused. The next pass writes both gradients, their transposes and, if requested, act. Bytes per
 * element: 4.12 in the first pass, 4.12 + 4 (+ 2) in the second. act keeps its scale. */
#include "kernels/cuda/lora.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/swiglu_fp8.cuh"

/* Encodes act with column factors. The factors are chosen first, unless the scale of act is
 * reused. */
template <class Reader>
static void with_factors(Tensor act, Reader reader)
{
    const int N = act.rows, F = act.cols;
    float *amax = amax_new();
    if (!scale_is_reused(act))
        channels_choose(act, amax, column_maxima(SwigluSource<Reader>{ {}, reader, F }, N, F));
    fp8_operand_from(act, amax, SwigluSource<Reader, true>{ { {}, act.channel }, reader, F }, N, F);
}

template <bool EXACT>
static void forward(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product)
{
    const int N = act.rows, F = act.cols;
    const bool saves = gate_up.data != wide.data;
    check_operand("swiglu_forward", "act", act, N, F);
    const bool in_one = saves && scale_is_reused(act) && !act.data_t && !act.channel,
               adds = product.xa.data;
    CHECK(!act.channel || !adds,
          "swiglu_forward: the CUDA back end does not support column factors "
          "together with an adapter");
    const AmaxProbe probe =
        in_one ? amax_probe_new() : AmaxProbe{ saves || adds ? amax_new() : NULL, NULL };
    if (saves)
        check_groups("swiglu_forward", "gate_up", gate_up, N, 2 * F);
    const bool added = adds && swiglu_save_added(probe, act, gate_up, wide, product, EXACT);
    if (added && EXACT && saves) {
        swiglu_codes_added(act, probe, wide, product);
        return;
    }
    if (!added && adds)
        backend_lora_widen(wide, product.xa, product.m, wide);
    if (!added && saves) {
        with_type(wide, [&](auto *in) {
            swiglu_save<EXACT>(in_one, probe, act, group_out(gate_up), in, EveryRow{});
        });
    }
    with_reader(EXACT ? wide : gate_up, [&](auto reader) {
        if (act.channel) {
            with_factors(act, reader);
            return;
        }
        const SwigluSource<decltype(reader)> source = { {}, reader, F };
        if (in_one)
            fp8_recode(act, probe, source, N, F);
        else if (saves || added)
            fp8_operand_from(act, probe.amax, source, N, F);
        else
            fp8_operand(act, {}, source, N, F);
    });
}

void swiglu_forward_fp8(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product, bool exact)
{
    (exact ? forward<true> : forward<false>)(act, gate_up, wide, product);
}

template <bool ACT, bool FACTORS, class Reader, class ReaderD>
static void swiglu_backward_tiles(Tensor dgate_up, Tensor act, Reader gate_up, ReaderD dact, int N,
                                  int F)
{
    typedef SwigluBackwardSource<Reader, ReaderD, ACT, FACTORS> Source;
    TileOuts<Source> outs = {};
    if (ACT)
        outs.out[Source::OUTPUTS - 1] = tile_out(act, NULL);
    fp8_operand<Source>(dgate_up, outs, { { {}, act.channel }, gate_up, dact, F }, N, F);
}

void swiglu_backward_fp8(Tensor dgate_up, Tensor act, Tensor dact, Tensor gate_up)
{
    const int N = dact.rows, F = dact.cols;
    check_operand("swiglu_backward", "dgate_up", dgate_up, N, 2 * F);
    if (tensor_exists(act))
        check_operand("swiglu_backward", "act", act, N, F);
    with_reader(gate_up, [&](auto in) {
        with_dense_reader(dact, [&](auto gradient) {
            if (tensor_exists(act) && act.channel)
                swiglu_backward_tiles<true, true>(dgate_up, act, in, gradient, N, F);
            else if (tensor_exists(act))
                swiglu_backward_tiles<true, false>(dgate_up, act, in, gradient, N, F);
            else
                swiglu_backward_tiles<false, false>(dgate_up, act, in, gradient, N, F);
        });
    });
}
