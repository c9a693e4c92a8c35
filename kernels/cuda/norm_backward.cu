/* Backward of RMSNorm and LayerNorm, for x in any format.
 *
 * Bytes per element in BF16: 6 (dy, x, dx), 2 more if dx accumulates. An x in FP8 groups takes 1.06
 * bytes instead of 2. Rounding is as in norm.cu. For dw, each block sums its rows in registers and
 * writes C floats of scratch memory. The rows of the blocks are added in the order of the blocks,
 * in F64. The number of blocks depends on the GPU only. */
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/tiles.cuh"

enum { BLOCKS_PER_SM = 4 };

/* A loaded pack, unpacked to eight floats. NOTE: for a dense tensor `unpack` returns the pack
 * itself, so that a number is unpacked where it is used. */
struct Values {
    float x[8];
    __device__ float operator[](int i) const
    {
        return x[i];
    }
};

template <class Reader>
__device__ static inline Values unpack(const Reader &x, const typename Reader::Raw &raw)
{
    Values v;
    x.values(v.x, raw);
    return v;
}

template <typename T>
__device__ static inline const Pack<T> &unpack(const DenseReader<T> &, const Pack<T> &raw)
{
    return raw;
}

/* partial: (gridDim.x, C), the sums of dy xh over each block's rows, or NULL. If MEASURED, *amax,
 * unless amax is NULL, is raised to the largest |dx| as stored. A row of dx is written after its
 * last read, so dx may be dy. Registers hold one row; the block's next row is prefetched to L2.
 * NOTE: an x in FP8 leaves enough registers for dx. In other cases, if not MEASURED, dx is loaded
 * after the sums have begun, and the rows stay packed during the reduction. CENTER is for
 * LayerNorm. RMSNorm saves four instructions per element, which matters. Intrinsics give RMSNorm
 * the same rounding as a LayerNorm with mean 0. */
template <bool MEASURED, bool CENTER, class Reader, typename TDY, typename TDX>
__global__ __launch_bounds__(MAX_THREADS) void norm_backward_kernel(TDX *dx, float *amax,
                                                                    float *partial, const TDY *dy,
                                                                    Reader x, const float2 *stats,
                                                                    AnyIn w, int N, int C,
                                                                    bool accumulate)
{
    __shared__ float shared[64];
    float dw[MAX_PACKS][8] = {}, m = 0;
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        const size_t row = (size_t)n * C;
        const float2 s = stats[n];
        Pack<TDY> d[MAX_PACKS];
        Pack<TDX> before[MAX_PACKS];
        typename Reader::Raw raw[MAX_PACKS];
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            d[j] = load_pack(dy + row + column(j), C - column(j));
            raw[j] = x.at(row + column(j), C - column(j));
            if (MEASURED)
                before[j] =
                    load_pack((const TDX *)dx + row + column(j), accumulate ? C - column(j) : 0);
        }
        if (threadIdx.x == 0 && n + gridDim.x < N) {
            const size_t next = row + (size_t)gridDim.x * C;
            prefetch(dy + next, C * sizeof *dy);
            x.bring(next, C);
            if (accumulate)
                prefetch(dx + next, C * sizeof *dx);
        }
        /* sums of g xh and of g. Columns from C on add nothing, because dy is 0 there */
        float sums[1 + CENTER] = {};
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            float weight[8];
            if (w.data)
                load_any(weight, w, column(j), C - column(j));
            const auto &in = unpack(x, raw[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float xh = (CENTER ? in[i] - s.x : in[i]) * s.y,
                            g = w.data ? d[j][i] * weight[i] : d[j][i];
                sums[0] += g * xh;
                if (CENTER)
                    sums[CENTER] += g;
                dw[j][i] += d[j][i] * xh;
            }
        }
        if constexpr (!MEASURED)
#pragma unroll
            for (int j = 0; j < MAX_PACKS; j++)
                before[j] =
                    load_pack((const TDX *)dx + row + column(j), accumulate ? C - column(j) : 0);
        block_sums(sums, shared);
        if constexpr (!MEASURED) {
            keep_packed(d);
            keep_packed(raw);
        }
        const float mean_g = CENTER ? sums[CENTER] / C : 0.0f, mean_gh = sums[0] / C;
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++) {
            float weight[8], out[8];
            if (MEASURED && column(j) >= C)
                continue;
            if (w.data)
                load_any(weight, w, column(j), MEASURED ? 8 : C - column(j));
            const auto &in = unpack(x, raw[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float xh = (CENTER ? in[i] - s.x : in[i]) * s.y;
                const float g = !w.data  ? d[j][i]
                                : CENTER ? d[j][i] * weight[i]
                                         : __fmul_rn(d[j][i], weight[i]);
                out[i] = s.y * (CENTER ? g - mean_g - xh * mean_gh : __fmaf_rn(-xh, mean_gh, g)) +
                         before[j][i];
            }
            if (MEASURED)
                m = fmaxf(m, pack_abs_max(out));
            store_pack(dx + row + column(j), out, MEASURED ? 8 : C - column(j));
        }
    }
    if (partial)
#pragma unroll
        for (int j = 0; j < MAX_PACKS; j++)
            store_pack(partial + (size_t)blockIdx.x * C + column(j), dw[j], C - column(j));
    if (MEASURED && amax) /* rounding is monotonic, so m, rounded, is the maximum of the stored
                           * values */
        raise_amax(amax, to_float(from_float<TDX>(m)), shared);
}

/* dx is F32 or BF16. */
static void backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats,
                     Tensor w, Norm norm, bool accumulate)
{
    const int N = dy.rows, C = dy.cols, most = BLOCKS_PER_SM * device_sm_count(),
              threads = norm_threads("norm_backward", C);
    const bool measured = amax || format_is_fp8(x.format);
    check_aligned("norm_backward", C, dy, x, dx, w);
    const int blocks = N > most && (measured || dw.data) ? most : N;
    float *partial =
        dw.data ? (float *)device_scratch((size_t)blocks * C * sizeof(float), SCRATCH_0) : NULL;
    if (N == 0)
        return;
    const auto launch = [&](auto is_measured, auto in) {
        with_type(dy, [&](auto *d) {
            with_type(dx, [&](auto *out) {
                with_bool(norm.kind == LAYER_NORM, [&](auto center) {
                    norm_backward_kernel<decltype(is_measured)::value, decltype(center)::value>
                        <<<blocks, threads, 0, device_stream()>>>(out, amax, partial, d, in,
                                                                  (const float2 *)stats, any_in(w),
                                                                  N, C, accumulate);
                });
            });
        });
    };
    if (measured && x.format.dtype == E4M3 && x.format.group == 16)
        launch(std::true_type(), group_reader(x, Known<E4M3>()));
    else if (measured)
        with_reader(x, [&](auto in) { launch(std::true_type(), in); });
    else
        with_dense_reader(x, [&](auto in) { launch(std::false_type(), in); });
    LAUNCH_CHECK();
    if (dw.data)
        add_column_sums(dw, partial, blocks, C);
}

void backend_norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x,
                           const float *stats, Tensor w, Norm norm, bool accumulate)
{
    const int N = dy.rows, C = dy.cols;
    CHECK_DENSE(dy, N, C);
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(dx, N, C);
    CHECK_DENSE_OPTIONAL(w, 1, C);
    CHECK_DENSE_OPTIONAL(dw, 1, C);
    CHECK(!accumulate || dx.data != dy.data,
          "norm_backward: dx accumulates, so it must not have the memory of dy");
    if (!format_is_fp8(dx.format)) {
        if (amax)
            backend_device_zero(amax, sizeof *amax);
        backward(dx, amax, dw, dy, x, stats, w, norm, accumulate);
        return;
    }
    /* the gradient of a branch in OLMo-2 goes through F32 scratch memory */
    check_operand(OPERATION, "dx", dx, N, C);
    CHECK(!accumulate && !amax,
          "norm_backward: dx is %s; expected f32 or bf16, to accumulate or for amax",
          format_name(dx.format));
    typedef ReaderSource<DenseReader<float>> Source;
    const Tensor wide = tensor_at(device_scratch((size_t)N * C * sizeof(float), SCRATCH_1),
                                  Format{ F32, 0, false }, N, C);
    amax = amax_new();
    backward(wide, amax, dw, dy, x, stats, w, norm, false);
    fp8_operand_from<Source>(dx, amax, { {}, { (const float *)wide.data, C } }, N, C);
}
