/* matmul_dx of the MLP's last layer with SwiGLU's backward in its epilogue. The BF16 tensor that
 * matmul_dx would write and swiglu_backward would read stays on the chip. Bytes per element of
 * dact: 2.12 + 4, and 1 more with act. Two separate operations take 2 + 2 bytes more. A tile is
 * finished in 32 parts, and each part overlaps with a stage of the next tile. Sums of less than
 * 3,984 terms have fewer stages; for these the two operations run separately.
 *
 * A thread has two consecutive tokens and eight consecutive columns of 32. To this end, row 8t +
 * 2j + c of each 32 rows of the weights is loaded to position 8j + 2t + c, and token 2i + c of each
 * 16 tokens to position 8c + i. So a thread writes eight bytes of a row, next to the bytes of three
 * other threads. A thread also has two bytes of each column, which stmatrix stores transposed in
 * shared memory. There the columns have the order of the weights' positions, and TMA writes them to
 * the right addresses.
 *
 * dgate_up is encoded with its reused scale. If the range was exceeded, a second launch recomputes
 * all of dgate_up; else this launch returns at once. */
#include "kernels/cuda/matmul_fused.cuh"
#include "kernels/cuda/swiglu.cuh"

namespace
{

/* columns of a strip: four threads with eight columns each */
constexpr int STRIP = 32, STRIPS = FUSED_WEIGHTS / STRIP;
constexpr int TRANSPOSED = 3; /* gradients of gate and of up, and act */

struct BackwardJob : FusedJob {
    TileOut dgate_up, act; /* act.data_t may be NULL; a NULL copy is not written */
    const float *channel;  /* factors of act's columns, for FACTORS */
    GroupReader<Known<E4M3>, Known<4>> gate_up;
    AmaxProbe probe;
    bool only_exceeded; /* the launch runs only if the range was exceeded */
};

struct BackwardShape {
    static constexpr int ACROSS = FUSED_WEIGHTS, PARTS = 4 * STRIPS;
    static constexpr DType TOKENS = E5M2;
    typedef BackwardJob Job;
};

template <bool FACTORS>
struct Backward : BackwardShape {
    struct TransposedCodes {
        uint8_t codes[TRANSPOSED][STRIP * 64];
    };

    /* Indexed [warpgroup][strip's parity], for a warpgroup's 64 tokens. The storing thread waits
     * for "full", the warpgroup waits for "empty". */
    struct Staging {
        alignas(1024) TransposedCodes transposed[2][2];
        Barrier full[2][2], empty[2][2];
    };

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

    struct Raw {
        decltype(Job::gate_up)::Raw gate, up;
    };

    const Job &job;
    Staging &staging;
    const int group;
    float inverse, act_inverse, m;
    TileOrigin at; /* origin of the tile that the warpgroup holds; column -1: none */
    Raw raw[2];    /* elements of the thread's two tokens, for the next strip */
    float gate_scale, up_scale;
    uint32_t codes[TRANSPOSED][2][2]; /* [token][half] */

    static __device__ int weights(const Job &, int column, int part)
    {
        return (column + part * FUSED_WEIGHTS / FUSED_PAIR) / STRIP;
    }

    static __device__ bool done(const Job &job)
    {
        return job.only_exceeded && was_in_range(job.dgate_up, job.probe);
    }

    static __device__ void init(Staging &staging)
    {
        for (int i = 0; i < 4; i++) {
            barrier_init(&staging.full[i / 2][i % 2], 4);
            barrier_init(&staging.empty[i / 2][i % 2], 1);
        }
    }

    __device__ Backward(const Job &job, Staging &staging, int group)
        : job(job), staging(staging), group(group), m(0), at{ 0, -1 }, raw{}, gate_scale(0),
          up_scale(0), codes{}
    {
        inverse = 1.0f / tile_scale(job.dgate_up, *tile_scale_from(job.dgate_up));
        act_inverse = job.act.data_t ? 1.0f / *job.act.scale : 0.0f;
    }

    __device__ int row() const
    {
        return at.token + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    }

    /* Returns the index of gate, and of its gradient, for the thread's token i. */
    __device__ size_t gate_at(int strip, int i) const
    {
        return (size_t)(row() + i) * 2 * job.F + at.column + STRIP * strip + 8 * (threadIdx.x % 4);
    }

    /* Loads gate and up of the thread's token i. */
    __device__ void fetch(int strip, int i)
    {
        const size_t from = gate_at(strip, i);
        const int left = row() < job.N ? 8 : 0;
        raw[i] = { job.gate_up.at(from, left), job.gate_up.at(from + job.F, left) };
    }

    __device__ void expect(TileOrigin origin)
    {
        at = origin;
        fetch(0, 0);
        fetch(0, 1);
    }

    __device__ static void multiply(float (&v)[4], float4 by)
    {
        v[0] *= by.x, v[1] *= by.y, v[2] *= by.z, v[3] *= by.w;
    }

    /* Finishes a part of a strip. A strip has four parts: for each of the thread's two tokens, the
     * first four columns, then the other four. */
    __device__ void finish(const Held &held, int part)
    {
        const int strip = part / 4, i = part / 2 % 2, half = part % 2;
        float gate[4], up[4], act[4], d[4];
        if (at.column < 0)
            return;
        if (half == 0) {
            gate_scale = fp8_group_value(raw[i].gate.scale, E4M3);
            up_scale = fp8_group_value(raw[i].up.scale, E4M3);
        }
        decode_four<E4M3>(gate, half ? raw[i].gate.codes.y : raw[i].gate.codes.x, gate_scale);
        decode_four<E4M3>(up, half ? raw[i].up.codes.y : raw[i].up.codes.x, up_scale);
        if (half == 1 && strip + 1 < STRIPS)
            fetch(strip + 1, i);
        unpack(d, held, 8 * strip + 4 * half + i);
        swiglu_gradients<true>(gate, up, act, d);
        if constexpr (FACTORS)
            multiply(act, *(const float4 *)(job.channel + at.column + STRIP * strip +
                                            8 * (threadIdx.x % 4) + 4 * half));
        m = fmaxf(m, fmaxf(pack_abs_max(gate), pack_abs_max(up)));
        codes[0][i][half] = encode_four<E5M2>(gate, inverse);
        codes[1][i][half] = encode_four<E5M2>(up, inverse);
        codes[2][i][half] = encode_four<E4M3>(act, act_inverse);
        if (half == 1 && row() < job.N) {
            *(uint2 *)(job.dgate_up.data + gate_at(strip, i)) =
                make_uint2(codes[0][i][0], codes[0][i][1]);
            *(uint2 *)(job.dgate_up.data + gate_at(strip, i) + job.F) =
                make_uint2(codes[1][i][0], codes[1][i][1]);
        }
        if (part % 4 == 3)
            store_columns(strip);
    }

    /* Stores a tile of 32 positions by 64 tokens, in rows of 64 bytes. TMA reads chunk c of row r
     * from position c ^ r / 2 % 4. */
    __device__ void store_transposed(uint8_t *to, const uint32_t (&codes)[2][2])
    {
        const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 ^ lane / 2 % 4;
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = __byte_perm(codes[0][i / 2], codes[1][i / 2], i % 2 ? 0x7362 : 0x5140);
        store_matrices_transposed(to + lane * 64 + chunk * 16, x);
    }

    __device__ void store_columns(int strip)
    {
        TransposedCodes &to = staging.transposed[group][strip % 2];
        barrier_wait(&staging.empty[group][strip % 2], strip / 2 % 2 ^ 1);
#pragma unroll
        for (int i = 0; i < TRANSPOSED; i++)
            if (i < 2 || job.act.data_t)
                store_transposed(to.codes[i], codes[i]);
        barrier_arrive_warp(&staging.full[group][strip % 2]);
    }

    /* Called by one thread. Stores the transposed codes of a warpgroup's tile, whose first token is
     * at.token. */
    static __device__ void carry(Staging &staging, const Job &job, const FusedMaps &maps,
                                 TileOrigin at, int group)
    {
        for (int strip = 0; strip < STRIPS; strip++) {
            const TransposedCodes &from = staging.transposed[group][strip % 2];
            const int column = at.column / STRIP + strip;
            barrier_wait(&staging.full[group][strip % 2], strip / 2 % 2);
            fence_async();
            if (at.token < job.N) {
                store_box(&maps.out[0], at.token, column, from.codes[0]);
                store_box(&maps.out[0], at.token, job.F / STRIP + column, from.codes[1]);
                if (job.act.data_t)
                    store_box(&maps.out[1], at.token, column, from.codes[2]);
            }
            copies_commit();
            copies_wait_read<0>();
            barrier_arrive(&staging.empty[group][strip % 2]);
        }
    }

    __device__ void end()
    {
        raise_amax_by_warp(job.probe.amax, *(volatile float *)job.probe.amax, m);
    }

#endif
};

bool fits(FusedMaps *maps, Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
          Tensor gate_up)
{
    const RowOrder tokens = { 16, { 8, 2, 1 }, { 2, 1, 16 } },
                   weights = { 32, { 2, 4, 4 }, { 1, 8, 2 } };
    const bool has_act = tensor_exists(act);
    return runs_on_hopper() && dy.fast && is_fusable(dy.data, dy, BackwardShape::TOKENS) &&
           is_fusable(w.data_t, w, E4M3) && is_fusable(dgate_up.data, dgate_up, E5M2) &&
           is_fusable(dgate_up.data_t, dgate_up, E5M2) && scale_is_reused(dgate_up) &&
           (!has_act || (is_fusable(act.data_t, act, E4M3) && !act.data)) &&
           dact.format.dtype == BF16 && gate_up.format.dtype == E4M3 &&
           gate_up.format.group == 16 && (uintptr_t)gate_up.data % 8 == 0 &&
           dact.cols % FUSED_WEIGHTS == 0 && dy.rows % 16 == 0 &&
           is_deep_enough<BackwardShape>(dy.cols) &&
           fused_map(&maps->x, dy.data, dy.rows, dy.cols, tokens, FUSED_TOKENS, FUSED_DEPTH) &&
           fused_map(&maps->w, w.data_t, w.cols, w.rows, weights, FUSED_WEIGHTS / FUSED_PAIR,
                     FUSED_DEPTH) &&
           fused_map(&maps->out[0], dgate_up.data_t, dgate_up.cols, dgate_up.rows, weights, STRIP,
                     64) &&
           (!has_act ||
            fused_map(&maps->out[1], act.data_t, act.cols, act.rows, weights, STRIP, 64));
}

template <bool FACTORS>
void launch(BackwardJob job, const FusedMaps &maps, Tensor dgate_up)
{
    launch_fused<Backward<FACTORS>>(job, maps);
    job.dgate_up = tile_out_recode(dgate_up, job.probe);
    job.only_exceeded = true;
    launch_fused<Backward<FACTORS>>(job, maps);
}

} // namespace

void backend_matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
                              Tensor gate_up)
{
    const int N = dy.rows, C = dy.cols, F = w.cols;
    FusedMaps maps = {};
    CHECK_TENSOR(w, C, F);
    CHECK_TENSOR(dact, N, F);
    if (!fits(&maps, dgate_up, act, dact, dy, w, gate_up)) {
        backend_matmul_dx(dact, dy, w, false);
        backend_swiglu_backward(dgate_up, act, dact, {}, gate_up);
        return;
    }
    check_operand("matmul_dx_swiglu", "dgate_up", dgate_up, N, 2 * F);
    check_groups("matmul_dx_swiglu", "gate_up", gate_up, N, 2 * F);
    if (tensor_exists(act))
        check_operand("matmul_dx_swiglu", "act", act, N, F);
    const bool has_factors = tensor_exists(act) && act.channel;
    const AmaxProbe probe = amax_probe_new();
    const BackwardJob job = { fused_job(dy, w, F),
                              tile_out_in_range(dgate_up, probe),
                              tile_out(act, NULL),
                              act.channel,
                              group_reader(gate_up, Known<E4M3>{}),
                              probe,
                              false };
    (has_factors ? launch<true> : launch<false>)(job, maps, dgate_up);
}
