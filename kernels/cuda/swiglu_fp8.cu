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
#include "kernels/cuda/channels.cuh"
#include "kernels/cuda/lora.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/swiglu.cuh"
#include "kernels/cuda/tiles.cuh"

enum { ROW_PACKS = 2, ROW_THREADS = 128, ROW_BLOCKS = 10 };

/* Applies the column factors to act if FACTORS. */
template <bool FACTORS>
struct ActSource : SimpleSource {
    const float *channel;
    typedef std::conditional_t<FACTORS, Factors, SimpleSource::Fix> Fix;
    __device__ Fix prepare(int col) const
    {
        if constexpr (FACTORS)
            return load_factors(channel, col);
        else
            return {};
    }
    __device__ static void finish(float (&act)[8], const Fix &fix)
    {
        if constexpr (FACTORS)
            fix.multiply(act);
    }
};

template <class Reader, bool FACTORS = false>
struct SwigluSource : ActSource<FACTORS> {
    typedef typename ActSource<FACTORS>::Fix Fix;
    Reader gate_up;
    int F;
    struct Raw {
        typename Reader::Raw gate, up;
    };
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(gate_up, row, col), load_inside(gate_up, row, F + col) };
    }
    __device__ void values(float (&act)[1][8], const Raw &raw, const Fix &fix, int, int) const
    {
        float g[8], u[8];
        gate_up.values(g, raw.gate);
        gate_up.values(u, raw.up);
#pragma unroll
        for (int i = 0; i < 8; i++)
            act[0][i] = g[i] * quick_sigmoid(g[i]) * u[i];
        this->finish(act[0], fix);
    }
};

/* ACT: there is a third output, act. */
template <class Reader, class ReaderD, bool ACT, bool FACTORS>
struct SwigluBackwardSource : ActSource<FACTORS> {
    enum { OUTPUTS = ACT ? 3 : 2, MEASURED = 2 };
    typedef typename ActSource<FACTORS>::Fix Fix;
    Reader gate_up;
    ReaderD dact;
    int F;
    struct Raw {
        typename Reader::Raw gate, up;
        typename ReaderD::Raw dact;
    };
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(gate_up, row, col), load_inside(gate_up, row, F + col),
                 load_inside(dact, row, col) };
    }
    __device__ int column(int output, int col) const
    {
        return output == 1 ? F + col : col;
    }
    __device__ void values(float (&out)[OUTPUTS][8], const Raw &raw, const Fix &fix, int, int) const
    {
        float d[8], act[8];
        gate_up.values(out[0], raw.gate);
        gate_up.values(out[1], raw.up);
        dact.values(d, raw.dact);
        swiglu_gradients<true>(out[0], out[1], ACT ? out[OUTPUTS - 1] : act, d);
        if (ACT)
            this->finish(out[OUTPUTS - 1], fix);
    }
};

/* Stores gate and up in FP8 groups. Raises *amax to max|act|, computed from stored values or, if
 * EXACT, from loaded values. CODES: also writes act. A thread has ROW_PACKS packs of gate and of
 * up. ALL_E4M3: all codes are E4M3, which is known at compile time. */
template <bool EXACT, bool CODES, bool ALL_E4M3, typename T>
__global__ __launch_bounds__(ROW_THREADS,
                             ROW_BLOCKS) void swiglu_save_kernel(float *amax, TileOut act,
                                                                 GroupOut saved, const T *gate_up,
                                                                 int N, int F)
{
    const float seen = *amax; /* a stale value only costs an extra atomic */
    const float inverse = CODES ? 1.0f / tile_scale(act, *tile_scale_from(act)) : 0.0f;
    const int first = 8 * (blockIdx.x * ROW_PACKS * ROW_THREADS + threadIdx.x),
              lane = threadIdx.x % 32;
    float m = 0;
    if (ALL_E4M3)
        act.dtype = saved.dtype = E4M3;
    for (int row = blockIdx.y; row < N; row += gridDim.y) {
        const size_t at = (size_t)row * F + first, gate_at = at + (size_t)row * F,
                     up_at = gate_at + F;
        Pack<T> g[ROW_PACKS], u[ROW_PACKS];
#pragma unroll
        for (int j = 0; j < ROW_PACKS; j++) {
            const int step = 8 * j * ROW_THREADS;
            g[j] = load_pack<true>(gate_up + gate_at + step, F - first - step);
            u[j] = load_pack<true>(gate_up + up_at + step, F - first - step);
        }
#pragma unroll
        for (int j = 0; j < ROW_PACKS; j++) {
            const int step = 8 * j * ROW_THREADS;
            float gate[8], up[8], y[8];
            /* the whole warp breaks, because store_group shuffles */
            if (first - 8 * lane + step >= F)
                break;
#pragma unroll
            for (int i = 0; i < 8; i++)
                gate[i] = g[j][i], up[i] = u[j][i];
            store_group(saved, gate_at + step, gate, first + step < F);
            store_group(saved, up_at + step, up, first + step < F);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float x = EXACT ? g[j][i] : gate[i];
                y[i] = x * quick_sigmoid(x) * (EXACT ? u[j][i] : up[i]);
            }
            m = fmaxf(m, pack_abs_max(y));
            if (CODES && first + step < F)
                *(uint2 *)(act.data + at + step) = encode_pack(y, inverse, act.dtype);
        }
    }
    raise_amax_by_warp(amax, seen, m);
}

template <bool EXACT, typename T>
static void save(bool codes, AmaxProbe probe, Tensor act, GroupOut saved, const T *wide)
{
    const int N = act.rows, F = act.cols, most = 65535; /* most: the limit of gridDim.y */
    const dim3 grid((unsigned)ceil_div(F, 8 * ROW_PACKS * ROW_THREADS), N < most ? N : most);
    const TileOut out = codes ? tile_out_in_range(act, probe) : TileOut{};
    with_bool(codes, [&](auto has_codes) {
        with_bool(act.format.dtype == E4M3 && saved.dtype == E4M3, [&](auto e4m3) {
            swiglu_save_kernel<EXACT, decltype(has_codes)::value, decltype(e4m3)::value>
                <<<grid, ROW_THREADS, 0, device_stream()>>>(probe.amax, out, saved, wide, N, F);
        });
    });
}

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
          "swiglu_forward: the CUDA back end has no factors of columns with a product");
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
        with_type(wide, [&](auto *in) { save<EXACT>(in_one, probe, act, group_out(gate_up), in); });
        LAUNCH_CHECK();
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
