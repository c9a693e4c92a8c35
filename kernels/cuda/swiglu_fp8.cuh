/* The passes of swiglu_fp8.cu and experts_swiglu.cu: Sources of act and of SwiGLU's gradients, and
 * the pass over rows that saves gate and up. */
#pragma once
#include "kernels/cuda/channels.cuh"
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

template <class Reader, bool FACTORS = false, class Rows = EveryRow>
struct SwigluSource : ActSource<FACTORS> {
    typedef typename ActSource<FACTORS>::Fix Fix;
    Reader gate_up;
    int F;
    Rows rows;
    struct Raw {
        typename Reader::Raw gate, up;
        float factor;
    };
    __device__ int end(int last) const
    {
        return rows.end(last);
    }
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(gate_up, row, col), load_inside(gate_up, row, F + col),
                 rows.factor(row) };
    }
    __device__ void values(float (&act)[1][8], const Raw &raw, const Fix &fix, int, int) const
    {
        float g[8], u[8];
        gate_up.values(g, raw.gate);
        gate_up.values(u, raw.up);
#pragma unroll
        for (int i = 0; i < 8; i++)
            act[0][i] = g[i] * quick_sigmoid(g[i]) * u[i] * raw.factor;
        this->finish(act[0], fix);
    }
};

/* ACT: there is a third output, act. */
template <class Reader, class ReaderD, bool ACT, bool FACTORS, class Rows = EveryRow>
struct SwigluBackwardSource : ActSource<FACTORS> {
    enum { OUTPUTS = ACT ? 3 : 2, MEASURED = 2 };
    typedef typename ActSource<FACTORS>::Fix Fix;
    Reader gate_up;
    ReaderD dact;
    int F;
    Rows rows;
    struct Raw {
        typename Reader::Raw gate, up;
        typename ReaderD::Raw dact;
        float factor;
    };
    __device__ int end(int last) const
    {
        return rows.end(last);
    }
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(gate_up, row, col), load_inside(gate_up, row, F + col),
                 load_inside(dact, row, col), rows.factor(row) };
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
#pragma unroll
        for (int i = 0; i < 8; i++)
            d[i] *= raw.factor;
        swiglu_gradients<true>(out[0], out[1], act, d);
        if constexpr (ACT) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                out[2][i] = act[i] * raw.factor;
            this->finish(out[2], fix);
        }
    }
};

/* Stores gate and up in FP8 groups. Raises *amax to max|act|, computed from stored values or, if
 * EXACT, from loaded values. CODES: also writes act. A thread has ROW_PACKS packs of gate and of
 * up. ALL_E4M3: all codes are E4M3, which is known at compile time. */
template <bool EXACT, bool CODES, bool ALL_E4M3, class Rows, typename T>
__global__ __launch_bounds__(ROW_THREADS,
                             ROW_BLOCKS) void swiglu_save_kernel(float *amax, TileOut act,
                                                                 GroupOut saved, const T *gate_up,
                                                                 Rows rows, int N, int F)
{
    const float seen = *amax; /* a stale value only costs an extra atomic */
    const float inverse = CODES ? 1.0f / tile_scale(act, *tile_scale_from(act)) : 0.0f;
    const int first = 8 * (blockIdx.x * ROW_PACKS * ROW_THREADS + threadIdx.x),
              lane = threadIdx.x % 32;
    float m = 0;
    if (ALL_E4M3)
        act.dtype = saved.dtype = E4M3;
    N = rows.end(N);
    for (int row = blockIdx.y; row < N; row += gridDim.y) {
        const float factor = rows.factor(row);
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
                y[i] = x * quick_sigmoid(x) * (EXACT ? u[j][i] : up[i]) * factor;
            }
            m = fmaxf(m, pack_abs_max(y));
            if (CODES && first + step < F)
                *(uint2 *)(act.data + at + step) = encode_pack(y, inverse, act.dtype);
        }
    }
    raise_amax_by_warp(amax, seen, m);
}

template <bool EXACT, class Rows, typename T>
static void swiglu_save(bool codes, AmaxProbe probe, Tensor act, GroupOut saved, const T *wide,
                        Rows rows)
{
    const int N = act.rows, F = act.cols, most = 65535; /* most: the limit of gridDim.y */
    const dim3 grid((unsigned)ceil_div(F, 8 * ROW_PACKS * ROW_THREADS), N < most ? N : most);
    const TileOut out = codes ? tile_out_in_range(act, probe) : TileOut{};
    with_bool(codes, [&](auto has_codes) {
        with_bool(act.format.dtype == E4M3 && saved.dtype == E4M3, [&](auto e4m3) {
            swiglu_save_kernel<EXACT, decltype(has_codes)::value, decltype(e4m3)::value>
                <<<grid, ROW_THREADS, 0, device_stream()>>>(probe.amax, out, saved, wide, rows, N,
                                                            F);
        });
    });
    LAUNCH_CHECK();
}
