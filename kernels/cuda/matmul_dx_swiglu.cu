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
 * For experts, a tile's rows are those of one expert, the gradient of act and act are multiplied by
 * the weights of their rows, and a row's part of dweight is summed for each tile (experts_fused.cuh).
 * There a stage overlaps with several parts, if necessary.
 *
 * dgate_up is encoded with its reused scale. If the range was exceeded, a second launch recomputes
 * all of dgate_up; else this launch returns at once. */
#include "kernels/cuda/experts_fused.cuh"
#include "kernels/cuda/swiglu.cuh"

namespace
{

/* columns of a strip: four threads with eight columns each */
constexpr int STRIP = 32, STRIPS = FUSED_WEIGHTS / STRIP;
constexpr int TRANSPOSED = 3; /* gradients of gate and of up, and act */

struct Dense {
    typedef OneMatrix Work;
    typedef EveryRow Rows;
    enum { WEIGHTED = false };
};
struct OfExperts {
    typedef MatrixOfEach Work;
    typedef AssignedRows Rows;
    enum { WEIGHTED = true };
};

/* Product: Dense or OfExperts. */
template <class Product>
struct BackwardJob : Product::Work::Job {
    TileOut dgate_up, act; /* act.data_t may be NULL; a NULL copy is not written */
    const float *channel;  /* factors of act's columns, for FACTORS */
    GroupReader<Known<E4M3>, Known<4>> gate_up;
    AmaxProbe probe;
    bool only_exceeded; /* the launch runs only if the range was exceeded */
    typename Product::Rows factors;
    float *dweight; /* (tiles across, R): partial sums of dweight, if WEIGHTED */
};

struct BackwardShape {
    static constexpr int ACROSS = FUSED_WEIGHTS, PARTS = 4 * STRIPS;
    static constexpr DType TOKENS = E5M2;
};

template <bool FACTORS, class Product>
struct Backward : BackwardShape {
    typedef BackwardJob<Product> Job;
    typedef typename Product::Work Work;
    enum { WEIGHTED = Product::WEIGHTED };

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
        typename decltype(Job::gate_up)::Raw gate, up;
    };

    const Job &job;
    Staging &staging;
    const int group, rows;
    float inverse, act_inverse, m;
    float factor[2], dweight[2]; /* values of the thread's two tokens, if WEIGHTED */
    FusedTile at;                /* origin of the tile that the warpgroup holds; column -1: none */
    Raw raw[2];                  /* elements of the thread's two tokens, for the next strip */
    float gate_scale, up_scale;
    uint32_t codes[TRANSPOSED][2][2]; /* [token][half] */

    static __device__ int weights(const Job &job, const FusedTile &at, int part)
    {
        return (at.matrix * job.F + at.column + part * FUSED_WEIGHTS / FUSED_PAIR) / STRIP;
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

    __device__ Backward(const Job &job, Staging &staging, int group, int rows)
        : job(job), staging(staging), group(group), rows(rows), m(0), factor{}, dweight{},
          at{ 0, -1 }, raw{}, gate_scale(0), up_scale(0), codes{}
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
        const int left = row() < rows ? 8 : 0;
        raw[i] = { job.gate_up.at(from, left), job.gate_up.at(from + job.F, left) };
    }

    __device__ void expect(FusedTile origin)
    {
        at = origin;
        fetch(0, 0);
        fetch(0, 1);
        if constexpr (WEIGHTED)
            for (int i = 0; i < 2; i++) {
                factor[i] = job.factors.factor_before(rows, row() + i);
                dweight[i] = 0;
            }
    }

    /* d is the gradient of act. As swiglu_gradients, with the weight of the thread's token i. */
    __device__ void gradients(float (&gate)[4], float (&up)[4], float (&act)[4], float (&d)[4],
                              int i)
    {
        float unweighted[4];
        if constexpr (WEIGHTED)
#pragma unroll
            for (int k = 0; k < 4; k++)
                unweighted[k] = d[k], d[k] *= factor[i];
        swiglu_gradients<true>(gate, up, act, d);
        if constexpr (WEIGHTED)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                dweight[i] += unweighted[k] * act[k];
                act[k] *= factor[i];
            }
    }

    /* Four threads have the columns of a token. */
    __device__ void store_dweight()
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = dweight[i];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (threadIdx.x % 4 == 0 && row() < rows)
                job.dweight[(size_t)(at.column / ACROSS) * job.N + row() + i] = sum;
        }
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
        gradients(gate, up, act, d, i);
        if constexpr (FACTORS)
            multiply(act, *(const float4 *)(job.channel + at.column + STRIP * strip +
                                            8 * (threadIdx.x % 4) + 4 * half));
        m = fmaxf(m, fmaxf(pack_abs_max(gate), pack_abs_max(up)));
        codes[0][i][half] = encode_four<E5M2>(gate, inverse);
        codes[1][i][half] = encode_four<E5M2>(up, inverse);
        codes[2][i][half] = encode_four<E4M3>(act, act_inverse);
        if (half == 1 && row() < rows) {
            *(uint2 *)(job.dgate_up.data + gate_at(strip, i)) =
                make_uint2(codes[0][i][0], codes[0][i][1]);
            *(uint2 *)(job.dgate_up.data + gate_at(strip, i) + job.F) =
                make_uint2(codes[1][i][0], codes[1][i][1]);
        }
        if (part % 4 == 3)
            store_columns(strip);
        if (WEIGHTED && part == PARTS - 1)
            store_dweight();
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
                                 FusedTile at, int group, int rows)
    {
        for (int strip = 0; strip < STRIPS; strip++) {
            const TransposedCodes &from = staging.transposed[group][strip % 2];
            const int column = at.column / STRIP + strip;
            barrier_wait(&staging.full[group][strip % 2], strip / 2 % 2);
            fence_async();
            if (at.token < rows) {
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

/* w has `matrices` matrices (C,F). */
bool fits(FusedMaps *maps, Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
          int matrices, Tensor gate_up)
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
           dact.cols % FUSED_WEIGHTS == 0 && dy.rows % 16 == 0 && dy.cols % 16 == 0 &&
           fused_map(&maps->x, dy.data, dy.rows, dy.cols, tokens, FUSED_TOKENS, FUSED_DEPTH) &&
           fused_map(&maps->w, w.data_t, matrices * w.cols, w.rows / matrices, weights,
                     FUSED_WEIGHTS / FUSED_PAIR, FUSED_DEPTH) &&
           fused_map(&maps->out[0], dgate_up.data_t, dgate_up.cols, dgate_up.rows, weights, STRIP,
                     64) &&
           (!has_act ||
            fused_map(&maps->out[1], act.data_t, act.cols, act.rows, weights, STRIP, 64));
}

template <bool FACTORS, class Product>
void launch(BackwardJob<Product> job, const FusedMaps &maps, Tensor dgate_up)
{
    launch_fused<Backward<FACTORS, Product>>(job, maps);
    job.dgate_up = tile_out_recode(dgate_up, job.probe);
    job.only_exceeded = true;
    launch_fused<Backward<FACTORS, Product>>(job, maps);
}

template <class Product>
BackwardJob<Product> backward_job(typename Product::Work::Job job, Tensor dgate_up, Tensor act,
                                  Tensor gate_up, typename Product::Rows rows, float *dweight)
{
    const AmaxProbe probe = amax_probe_new();
    return { job,
             tile_out_in_range(dgate_up, probe),
             tile_out(act, NULL),
             act.channel,
             group_reader(gate_up, Known<E4M3>{}),
             probe,
             false,
             rows,
             dweight };
}

/* dweight[row] = the sum of its parts, for the rows in use. */
__global__ void add_dweight_kernel(float *dweight, const float *parts, const int *last, int count,
                                   int R)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    if (row >= *last)
        return;
    for (int i = 0; i < count; i++)
        sum += parts[(size_t)i * R + row];
    dweight[row] = sum;
}

} // namespace

void backend_matmul_dx_swiglu(Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w,
                              Tensor gate_up)
{
    const int N = dy.rows, C = dy.cols, F = w.cols;
    FusedMaps maps = {};
    CHECK_TENSOR(w, C, F);
    CHECK_TENSOR(dact, N, F);
    if (!is_deep_enough<BackwardShape>(C) || !fits(&maps, dgate_up, act, dact, dy, w, 1, gate_up)) {
        backend_matmul_dx(dact, dy, w, false);
        backend_swiglu_backward(dgate_up, act, dact, {}, gate_up);
        return;
    }
    check_operand("matmul_dx_swiglu", "dgate_up", dgate_up, N, 2 * F);
    check_groups("matmul_dx_swiglu", "gate_up", gate_up, N, 2 * F);
    if (tensor_exists(act))
        check_operand("matmul_dx_swiglu", "act", act, N, F);
    const bool has_factors = tensor_exists(act) && act.channel;
    const BackwardJob<Dense> job =
        backward_job<Dense>(fused_job(dy, w, F), dgate_up, act, gate_up, {}, NULL);
    (has_factors ? launch<true, Dense> : launch<false, Dense>)(job, maps, dgate_up);
}

void backend_experts_matmul_dx_swiglu(Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                                      Tensor dy, Tensor w, Tensor gate_up, Routing r)
{
    const int R = dy.rows, F = w.cols, tiles = F / BackwardShape::ACROSS;
    FusedMaps maps = {};
    check_experts_matmul_dx(dact, dy, w, r);
    check_experts_swiglu_backward(dgate_up, act, dweight, dact, gate_up, r);
    if (r.experts > MOST_EXPERTS || !fits(&maps, dgate_up, act, dact, dy, w, r.experts, gate_up)) {
        backend_experts_matmul_dx(dact, dy, w, r);
        backend_experts_swiglu_backward(dgate_up, act, dweight, dact, gate_up, r);
        return;
    }
    check_operand(OPERATION, "dgate_up", dgate_up, R, 2 * F);
    check_groups(OPERATION, "gate_up", gate_up, R, 2 * F);
    float *parts = (float *)device_scratch((size_t)tiles * R * sizeof(float), SCRATCH_0);
    launch<false>(backward_job<OfExperts>(experts_job(fused_job(dy, w, F), r), dgate_up, act,
                                          gate_up, { r.first + r.experts, r.assignment, r.weight },
                                          parts),
                  maps, dgate_up);
    add_dweight_kernel<<<(unsigned)ceil_div(R, 256), 256, 0, device_stream()>>>(
        dweight, parts, r.first + r.experts, tiles, R);
    LAUNCH_CHECK();
}
