/* SwiGLU of experts: rows of assignments, whose act is multiplied by the assignment's weight.
 *
 * With FP8, the passes are those of swiglu_fp8.cu over the rows in use. In backward another pass
 * comes first: a warp sums the dweight of a row, at 4.12 bytes per element. Without FP8, a block has
 * a row. Forward takes 6 bytes per element of act, and 4 more if gate_up is not the memory of wide;
 * backward takes 10, or 12 with act. */
#include "kernels/cuda/swiglu_fp8.cuh"

enum { PACKS = 2, MAX_THREADS = 256, WARPS = MAX_THREADS / 32 };

static AssignedRows assigned_rows(Routing r)
{
    return { r.first + r.experts, r.assignment, r.weight };
}

/* ---- forward --------------------------------------------------------------------------------- */

/* stored.data is NULL if gate_up is the memory of wide. exact: act is computed from wide. */
template <typename T>
__global__
__launch_bounds__(MAX_THREADS) void experts_swiglu_kernel(AnyOut act, AnyOut stored, const T *wide,
                                                          AssignedRows rows, bool exact, int F)
{
    const size_t row = (size_t)blockIdx.x * F;
    const T *gate = wide + 2 * row, *up = gate + F;
    if ((int)blockIdx.x >= *rows.last)
        return;
    const float factor = rows.factor(blockIdx.x);
    for (int f = 8 * threadIdx.x; f < F; f += 8 * blockDim.x) {
        const Pack<T> g = load_pack(gate + f, 8), u = load_pack(up + f, 8);
        float gx[8], ux[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            gx[i] = as_stored(stored, g, i), ux[i] = as_stored(stored, u, i);
            const float a = exact ? g[i] : gx[i], b = exact ? u[i] : ux[i];
            y[i] = factor * (a * sigmoid(a) * b);
        }
        if (stored.data) {
            store_any(stored, 2 * row + f, gx, 8);
            store_any(stored, 2 * row + F + f, ux, 8);
        }
        store_any(act, row + f, y, 8);
    }
}

/* Computes act, with gate_up = wide in F32 or BF16. */
template <typename T>
__global__ __launch_bounds__(MAX_THREADS) void save_dense_kernel(AnyOut gate_up, const T *wide,
                                                                 const int *last, int cols)
{
    const size_t row = (size_t)blockIdx.x * cols;
    if ((int)blockIdx.x >= *last)
        return;
    for (int c = 8 * threadIdx.x; c < cols; c += 8 * blockDim.x) {
        const Pack<T> pack = load_pack(wide + row + c, 8);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = pack[i];
        store_any(gate_up, row + c, v, 8);
    }
}

static void save_dense(const char *op, Tensor gate_up, Tensor wide, AssignedRows rows)
{
    check_aligned(op, wide.cols, gate_up, wide);
    with_type(wide, [&](auto *in) {
        save_dense_kernel<<<wide.rows, MAX_THREADS, 0, device_stream()>>>(any_out(gate_up), in,
                                                                          rows.last, wide.cols);
    });
    LAUNCH_CHECK();
}

template <bool EXACT>
static void forward_fp8(const char *op, Tensor act, Tensor gate_up, Tensor wide, Routing r)
{
    const int R = act.rows, F = act.cols;
    const bool saves = format_is_fp8(gate_up.format),
               in_one = saves && scale_is_reused(act) && !act.data_t;
    const AssignedRows rows = assigned_rows(r);
    const AmaxProbe probe =
        in_one ? amax_probe_new() : AmaxProbe{ saves ? amax_new() : NULL, NULL };
    check_operand(op, "act", act, R, F);
    check_dense(op, "wide", wide, R, 2 * F);
    if (!saves && gate_up.data != wide.data)
        save_dense(op, gate_up, wide, rows);
    if (saves) {
        check_groups(op, "gate_up", gate_up, R, 2 * F);
        with_type(wide, [&](auto *in) {
            swiglu_save<EXACT>(in_one, probe, act, group_out(gate_up), in, rows);
        });
    }
    with_reader(EXACT ? wide : gate_up, [&](auto reader) {
        const SwigluSource<decltype(reader), false, AssignedRows> source = { {}, reader, F, rows };
        if (in_one)
            fp8_recode(act, probe, source, R, F);
        else if (saves)
            fp8_operand_from(act, probe.amax, source, R, F);
        else
            fp8_operand(act, {}, source, R, F);
    });
}

void backend_experts_swiglu(Tensor act, Tensor gate_up, Tensor wide, Routing r, ForwardSource from)
{
    const int R = act.rows, F = act.cols;
    check_experts_swiglu(act, gate_up, wide, r);
    if (format_is_fp8(act.format)) {
        (from == FROM_EXACT ? forward_fp8<true> : forward_fp8<false>)(OPERATION, act, gate_up, wide,
                                                                      r);
        return;
    }
    CHECK_DENSE(gate_up, R, 2 * F);
    CHECK_DENSE(wide, R, 2 * F);
    check_aligned(OPERATION, F, act, gate_up, wide);
    AnyOut stored = any_out(gate_up);
    if (gate_up.data == wide.data)
        stored.data = NULL;
    with_type(wide, [&](auto *in) {
        const int threads = round_threads(F / 8, 1, MAX_THREADS);
        experts_swiglu_kernel<<<R, threads, 0, device_stream()>>>(
            any_out(act), stored, in, assigned_rows(r), from == FROM_EXACT, F);
    });
    LAUNCH_CHECK();
}

/* ---- backward -------------------------------------------------------------------------------- */

/* act.data is NULL if the kernel does not write act. */
template <typename TD, typename T>
__global__ __launch_bounds__(MAX_THREADS) void experts_swiglu_backward_kernel(
    AnyOut dgate_up, AnyOut act, float *dweight, const TD *dact, const T *gate_up,
    AssignedRows rows, int F)
{
    __shared__ float shared[32];
    const size_t row = (size_t)blockIdx.x * F;
    const T *gate = gate_up + 2 * row, *up = gate + F;
    float sum = 0;
    if ((int)blockIdx.x >= *rows.last)
        return;
    const float factor = rows.factor(blockIdx.x);
    for (int f = 8 * threadIdx.x; f < F; f += 8 * blockDim.x) {
        const Pack<T> g = load_pack(gate + f, 8), u = load_pack(up + f, 8);
        const Pack<TD> d = load_pack(dact + row + f, 8);
        float dgate[8], dup[8], y[8], dy[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            dgate[i] = g[i], dup[i] = u[i], dy[i] = d[i] * factor;
        swiglu_gradients<false>(dgate, dup, y, dy);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum += d[i] * y[i];
            y[i] *= factor;
        }
        store_any(dgate_up, 2 * row + f, dgate, 8);
        store_any(dgate_up, 2 * row + F + f, dup, 8);
        if (act.data)
            store_any(act, row + f, y, 8);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        dweight[blockIdx.x] = sum;
}

/* Each warp computes a row; a lane has PACKS packs in flight. */
template <class Reader, class ReaderD>
__global__ __launch_bounds__(MAX_THREADS) void dweight_kernel(float *dweight, ReaderD dact,
                                                              Reader gate_up, const int *last,
                                                              int F)
{
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0;
    if (row >= *last)
        return;
    for (int first = 8 * lane; first < F; first += 8 * 32 * PACKS) {
        typename Reader::Raw gate[PACKS], up[PACKS];
        typename ReaderD::Raw gradient[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int f = first + 8 * 32 * j;
            const size_t at = (size_t)row * F + f, gate_at = at + (size_t)row * F;
            gate[j] = gate_up.at(gate_at, F - f), up[j] = gate_up.at(gate_at + F, F - f);
            gradient[j] = dact.at(at, F - f);
        }
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            float g[8], u[8], d[8];
            if (first + 8 * 32 * j >= F)
                break;
            gate_up.values(g, gate[j]);
            gate_up.values(u, up[j]);
            dact.values(d, gradient[j]);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum += d[i] * (g[i] * quick_sigmoid(g[i]) * u[i]);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0)
        dweight[row] = sum;
}

template <bool ACT, class Reader, class ReaderD>
static void backward_tiles(Tensor dgate_up, Tensor act, Reader gate_up, ReaderD dact,
                           AssignedRows rows, int R, int F)
{
    typedef SwigluBackwardSource<Reader, ReaderD, ACT, false, AssignedRows> Source;
    TileOuts<Source> outs = {};
    if (ACT)
        outs.out[Source::OUTPUTS - 1] = tile_out(act, NULL);
    fp8_operand<Source>(dgate_up, outs, { {}, gate_up, dact, F, rows }, R, F);
}

static void backward_fp8(const char *op, Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                         Tensor gate_up, Routing r)
{
    const int R = dact.rows, F = dact.cols;
    const AssignedRows rows = assigned_rows(r);
    const bool has_act = tensor_exists(act);
    check_operand(op, "dgate_up", dgate_up, R, 2 * F);
    if (has_act)
        check_operand(op, "act", act, R, F);
    CHECK(!has_act || format_is_fp8(act.format), "%s: act is %s, dgate_up is %s", op,
          format_name(act.format), format_name(dgate_up.format));
    with_reader(gate_up, [&](auto in) {
        with_dense_reader(dact, [&](auto gradient) {
            dweight_kernel<<<(unsigned)ceil_div(R, WARPS), MAX_THREADS, 0, device_stream()>>>(
                dweight, gradient, in, rows.last, F);
            LAUNCH_CHECK();
            if (has_act)
                backward_tiles<true>(dgate_up, act, in, gradient, rows, R, F);
            else
                backward_tiles<false>(dgate_up, act, in, gradient, rows, R, F);
        });
    });
}

void backend_experts_swiglu_backward(Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                                     Tensor gate_up, Routing r)
{
    const int R = dact.rows, F = dact.cols;
    check_experts_swiglu_backward(dgate_up, act, dweight, dact, gate_up, r);
    CHECK_DENSE(dact, R, F);
    if (format_is_fp8(dgate_up.format)) {
        backward_fp8(OPERATION, dgate_up, act, dweight, dact, gate_up, r);
        return;
    }
    CHECK_DENSE(gate_up, R, 2 * F);
    CHECK_DENSE_OPTIONAL(act, R, F);
    check_aligned(OPERATION, F, dgate_up, act, dact, gate_up);
    CHECK(dgate_up.data != gate_up.data || format_equal(dgate_up.format, gate_up.format),
          "%s: dgate_up and gate_up share memory, not their format", OPERATION);
    CHECK(act.data != dact.data || format_equal(act.format, dact.format),
          "%s: act and dact share memory, not their format", OPERATION);
    with_type(dact, [&](auto *d) {
        with_type(gate_up, [&](auto *in) {
            const int threads = round_threads(F / 8, 1, MAX_THREADS);
            experts_swiglu_backward_kernel<<<R, threads, 0, device_stream()>>>(
                any_out(dgate_up), any_out(act), dweight, d, in, assigned_rows(r), F);
        });
    });
    LAUNCH_CHECK();
}
