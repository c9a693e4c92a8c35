/* The first product of the MLP with SwiGLU in its epilogue. The BF16 tensor that matmul would write
 * and swiglu_forward would read stays on the chip. Bytes per element of act: 2.12 + 1. Two separate
 * operations take 4 + 4 + 2.12 + 1.
 *
 * A tile's weights are 128 rows of gate and the same rows of up. wgmma gives a thread two of every
 * eight columns of sums. So row 16t + 2j + c of each 64 rows is loaded to position 8j + 2t + c, and
 * a thread has 16 neighbouring columns: a group of gate_up, and 16 bytes of codes.
 *
 * For experts, a tile's rows are those of one expert, and act is multiplied by the weights of its
 * rows (experts_fused.cuh).
 *
 * act is encoded with its reused scale. If the range was exceeded, a second launch recomputes all
 * of act; else this launch returns at once. This kernel does not write the transposed copy of act,
 * which some recipes save. For these recipes the two operations run separately. */
#include "kernels/cuda/channels.cuh"
#include "kernels/cuda/experts_fused.cuh"
#include "kernels/cuda/swiglu.cuh"

namespace
{

constexpr int COLUMNS = FUSED_WEIGHTS / 2;

struct Dense {
    typedef OneMatrix Work;
    typedef EveryRow Rows;
};
struct OfExperts {
    typedef MatrixOfEach Work;
    typedef AssignedRows Rows;
};

/* Product: Dense or OfExperts. */
template <class Product>
struct ForwardJob : Product::Work::Job {
    TileOut act;
    GroupOut saved;
    const float *channel; /* factors of act's columns, for FACTORS */
    AmaxProbe probe;
    bool only_exceeded; /* the launch runs only if the range was exceeded */
    typename Product::Rows factors;
};

struct ForwardShape {
    static constexpr int ACROSS = COLUMNS, PARTS = 8;
    static constexpr DType TOKENS = E4M3;
};

template <bool FACTORS, class Product>
struct Forward : ForwardShape {
    typedef ForwardJob<Product> Job;
    typedef typename Product::Work Work;
    struct Staging {
    };

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

    const Job &job;
    const int rows;
    float seen, inverse, m;
    /* the thread's first row and column; no sums are held if row is after the last row */
    int row, column;
    float factor[2]; /* factors of the thread's rows */

    /* Part 0 is gate, part 1 is up. */
    static __device__ int weights(const Job &job, const FusedTile &at, int part)
    {
        return ((2 * at.matrix + part) * job.F + at.column) / 64;
    }

    static __device__ bool done(const Job &job)
    {
        return job.only_exceeded && was_in_range(job.act, job.probe);
    }

    static __device__ void init(Staging &)
    {
    }
    static __device__ void carry(Staging &, const Job &, const FusedMaps &, FusedTile, int, int)
    {
    }

    __device__ Forward(const Job &job, Staging &, int, int rows)
        : job(job), rows(rows), m(0), row(rows), column(0), factor{}
    {
        seen = *job.probe.amax;
        inverse = 1.0f / tile_scale(job.act, *tile_scale_from(job.act));
    }

    __device__ void expect(FusedTile at)
    {
        const int lane = threadIdx.x % 32;
        row = at.token + threadIdx.x / 32 % 4 * 16 + lane / 4;
        column = at.column + 16 * (lane % 4);
        for (int i = 0; i < 2; i++)
            factor[i] = job.factors.factor_before(rows, row + 8 * i);
    }

    __device__ static void store_codes(uint8_t *to, const float (&v)[2][8], float inverse)
    {
        const uint2 a = encode_pack<E4M3>(v[0], inverse), b = encode_pack<E4M3>(v[1], inverse);
        *(uint4 *)to = make_uint4(a.x, a.y, b.x, b.y);
    }

    __device__ static float abs_max(const float (&v)[2][8])
    {
        return fmaxf(pack_abs_max(v[0]), pack_abs_max(v[1]));
    }

    __device__ static void store_whole_group(GroupOut out, size_t at, const float (&v)[2][8])
    {
        const uint8_t scale = fp8_group_scale(abs_max(v), E4M3);
        store_codes(out.data + at, v, inverse_of_few_bits(fp8_group_value(scale, E4M3)));
        out.scale[at / 16] = scale;
    }

    /* Saves gate and up of 16 columns (even parts), or stores act (odd parts). */
    __device__ void finish(const Held &held, int part)
    {
        const int half = part / 2 % 2, below = part / 4, n = row + 8 * below;
        const size_t at = (size_t)n * job.F + column + 64 * half, gate_at = at + (size_t)n * job.F;
        float gate[2][8], up[2][8], act[2][8];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            unpack(gate[k], held, 16 * half + 8 * k + below);
            unpack(up[k], held, FUSED_SUMS / 4 + 16 * half + 8 * k + below);
        }
        if (n >= rows)
            return;
        if (part % 2 == 0) {
            store_whole_group(job.saved, gate_at, gate);
            store_whole_group(job.saved, gate_at + job.F, up);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++)
                act[i / 8][i % 8] = gate[i / 8][i % 8] * quick_sigmoid(gate[i / 8][i % 8]) *
                                    up[i / 8][i % 8] * factor[below];
            if constexpr (FACTORS)
#pragma unroll
                for (int k = 0; k < 2; k++)
                    load_factors(job.channel, column + 64 * half + 8 * k).multiply(act[k]);
            store_codes(job.act.data + at, act, inverse);
            m = fmaxf(m, abs_max(act));
        }
    }

    __device__ void end()
    {
        raise_amax_by_warp(job.probe.amax, seen, m);
    }

#endif
};

bool fits(FusedMaps *maps, Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w)
{
    const RowOrder tokens = { 16, { 16, 1, 1 }, { 1, 16, 16 } },
                   weights = { 64, { 2, 4, 8 }, { 1, 16, 2 } };
    return runs_on_hopper() && x.fast && is_fusable(x.data, x, ForwardShape::TOKENS) &&
           is_fusable(w.data, w, E4M3) && is_fusable(act.data, act, E4M3) && !act.data_t &&
           scale_is_reused(act) && wide.format.dtype == BF16 && gate_up.format.dtype == E4M3 &&
           gate_up.format.group == 16 && (uintptr_t)gate_up.data % 16 == 0 &&
           act.cols % COLUMNS == 0 && x.rows % 16 == 0 && x.cols % 16 == 0 &&
           fused_map(&maps->x, x.data, x.rows, x.cols, tokens, FUSED_TOKENS, FUSED_DEPTH) &&
           fused_map(&maps->w, w.data, w.rows, w.cols, weights, COLUMNS, FUSED_DEPTH);
}

template <bool FACTORS, class Product>
void launch(ForwardJob<Product> job, const FusedMaps &maps, Tensor act)
{
    launch_fused<Forward<FACTORS, Product>>(job, maps);
    job.act = tile_out_recode(act, job.probe);
    job.only_exceeded = true;
    launch_fused<Forward<FACTORS, Product>>(job, maps);
}

template <class Product>
ForwardJob<Product> forward_job(typename Product::Work::Job job, Tensor act, Tensor gate_up,
                                typename Product::Rows rows)
{
    const AmaxProbe probe = amax_probe_new();
    return {
        job, tile_out_in_range(act, probe), group_out(gate_up), act.channel, probe, false, rows
    };
}

} // namespace

void backend_matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w)
{
    const int N = x.rows, C = x.cols, F = act.cols;
    FusedMaps maps = {};
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(w, 2 * F, C);
    CHECK_TENSOR(wide, N, 2 * F);
    if (!is_deep_enough<ForwardShape>(C) || !fits(&maps, act, gate_up, wide, x, w)) {
        backend_matmul(wide, x, w, {});
        backend_swiglu_forward(act, gate_up, wide, {}, FROM_EXACT);
        return;
    }
    check_operand("matmul_swiglu", "act", act, N, F);
    check_groups("matmul_swiglu", "gate_up", gate_up, N, 2 * F);
    const ForwardJob<Dense> job = forward_job<Dense>(fused_job(x, w, F), act, gate_up, {});
    (act.channel ? launch<true, Dense> : launch<false, Dense>)(job, maps, act);
}

void backend_experts_matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w,
                                   Routing r)
{
    const int R = x.rows, F = act.cols;
    FusedMaps maps = {};
    check_experts_matmul(wide, x, w, r);
    check_experts_swiglu(act, gate_up, wide, r);
    if (r.experts > MOST_EXPERTS || !fits(&maps, act, gate_up, wide, x, w)) {
        backend_experts_matmul(wide, x, w, r);
        backend_experts_swiglu(act, gate_up, wide, r, FROM_EXACT);
        return;
    }
    check_operand(OPERATION, "act", act, R, F);
    check_groups(OPERATION, "gate_up", gate_up, R, 2 * F);
    launch<false>(forward_job<OfExperts>(experts_job(fused_job(x, w, F), r), act, gate_up,
                                         { r.first + r.experts, r.assignment, r.weight }),
                  maps, act);
}
