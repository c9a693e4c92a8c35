/* Cross entropy and its gradient, which replaces the logits or is written as FP8 codes. Each block
 * computes one row. In one pass, each thread keeps a running maximum and the sum of exponentials
 * relative to this maximum, and rescales the sum when the maximum grows. The block merges these
 * sums.
 *
 * Bytes per logit in BF16: 4 (read, gradient), 3 with codes, 2 without the gradient. For the
 * gradient a thread keeps its first KEEP packs in registers. These packs hold the whole row if it
 * has up to 65536 columns in BF16, or up to half of that in F32. Further columns are read a second
 * time, from the L2 cache if the rows in flight, one per SM, fit into it. Without the gradient no
 * packs are kept, and blocks are small, so that some blocks read while others compute. Rounding:
 * e^x is 2^(x log2 e) by the hardware's ex2, with a relative error of 2^-22, in the sum and in the
 * gradient. Sums are F32 per thread and warp. `base2` is log2(e) / temperature. */
#include "kernels/cuda/loss.cuh"

enum { MAX_THREADS = 1024, LOSS_THREADS = 256, LOSS_BLOCKS = 6, AHEAD = 4 };
template <typename T>
constexpr int KEEP = 16 / sizeof(T);
/* Stores factor * 2^(base2 (x - max)), minus `scale` in the target's column, and 0 in columns after the
 * vocabulary. Columns are relative to the pack. */
template <class Gradient, typename To, typename T>
__device__ static inline void store_gradient(const Gradient &gradient, To *to, const Pack<T> &pack,
                                             int left, int vocab_left, int target, float max,
                                             float base2, float factor, float scale)
{
    const float shift = -max * base2;
    float g[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        g[i] = factor * exp2_quick(fmaf(pack[i], base2, shift));
    if ((unsigned)target < 8 || vocab_left < 8)
#pragma unroll
        for (int i = 0; i < 8; i++)
            g[i] = i >= vocab_left ? 0.0f : i == target ? g[i] - scale : g[i];
    gradient.store(to, g, left);
}

/* Loads the thread's next packs of a row, from column c on, `step` columns apart. */
template <bool ALIGNED, typename T, int K>
__device__ static inline void load_packs(Pack<T> (&pack)[K], const T *row, int c, int step, int V)
{
#pragma unroll
    for (int j = 0; j < K; j++)
        pack[j] = load_pack<ALIGNED>(row + c + j * step, V - c - j * step);
}

template <bool ALIGNED, bool BACKWARD, class Gradient, typename T>
__global__ __launch_bounds__(
    BACKWARD ? MAX_THREADS : LOSS_THREADS,
    BACKWARD ? 1 : LOSS_BLOCKS) void cross_entropy_kernel(Gradient gradient, T *logits, float *loss,
                                                          float *zloss, const int *targets,
                                                          const float *weights, int V, int vocab,
                                                          float inverse, float scale,
                                                          float z_weight)
{
    constexpr int CACHED = BACKWARD ? KEEP<T> : 0;
    __shared__ float shared[32];
    T *row = logits + (size_t)blockIdx.x * V;
    const int target = targets[blockIdx.x], step = 8 * blockDim.x, cached = CACHED * step;
    if (target < 0) {
        if (threadIdx.x == 0)
            loss[blockIdx.x] = zloss[blockIdx.x] = 0;
        if (BACKWARD)
            store_zeros(gradient, gradient.begin(row, V), V);
        return;
    }
    const float target_logit = to_float(row[target]), base2 = LOG2E * inverse;
    const int first = 8 * threadIdx.x;
    Pack<T> keep[KEEP<T>];
    Running r = { -FLT_MAX, 0 };
    if (BACKWARD)
        load_packs<ALIGNED>(keep, row, first, step, V);
#pragma unroll
    for (int j = 0; j < CACHED; j++)
        if (first + j * step < vocab)
            add_pack(r, keep[j], vocab - first - j * step, base2);
    for (int c = first + cached; c < vocab; c += AHEAD * step) {
        Pack<T> pack[AHEAD];
        load_packs<ALIGNED>(pack, row, c, step, V);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (c + j * step < vocab)
                add_pack(r, pack[j], vocab - c - j * step, base2);
    }
    r = block_total(r, base2, shared);
    const float z = r.max * inverse + logf(r.total);
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = z - target_logit * inverse;
        zloss[blockIdx.x] = z * z;
    }
    if (!BACKWARD)
        return;
    keep_packed(keep);
    scale *= inverse;
    if (weights)
        scale *= weights[blockIdx.x];
    const float factor = scale * (1.0f + 2.0f * z_weight * z) / r.total;
    auto *to = gradient.begin(row, V);
#pragma unroll
    for (int j = 0; j < CACHED; j++) {
        const int c = first + j * step;
        if (c < V)
            store_gradient(gradient, to + c, keep[j], V - c, vocab - c, target - c, r.max, base2,
                           factor, scale);
    }
    for (int c = first + cached; c < V; c += AHEAD * step) {
        Pack<T> pack[AHEAD];
        load_packs<ALIGNED>(pack, row, c, step, V);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (c + j * step < V)
                store_gradient(gradient, to + c + j * step, pack[j], V - c - j * step,
                               vocab - c - j * step, target - c - j * step, r.max, base2, factor,
                               scale);
    }
}

/* With a gradient, launches large blocks, whose threads keep the row in registers. Without a
 * gradient, launches small blocks, which load ahead. */
template <bool ALIGNED, bool BACKWARD, class Gradient, typename T>
static void launch(Gradient gradient, T *logits, Tensor shape, float *loss, float *zloss,
                   const int *target, const float *weight, int vocab, float temperature,
                   float scale, float z_weight)
{
    const int each = BACKWARD ? KEEP<T> : AHEAD, most = BACKWARD ? MAX_THREADS : LOSS_THREADS;
    cross_entropy_kernel<ALIGNED, BACKWARD>
        <<<shape.rows, block_threads((int)ceil_div(shape.cols, 8), each, most), 0,
           device_stream()>>>(gradient, logits, loss, zloss, target, weight, shape.cols, vocab,
                              1 / temperature, scale, z_weight);
    LAUNCH_CHECK();
}

static void check_vocabulary(const char *op, int vocab, int V)
{
    CHECK(vocab > 0 && vocab <= V, "%s: a vocabulary of %d in %d columns", op, vocab, V);
}

void backend_cross_entropy(Tensor logits, float *loss, float *zloss, const int *target,
                           const float *weight, int vocab, float temperature, float scale,
                           float z_weight, bool backward)
{
    const int N = logits.rows, V = logits.cols;
    CHECK_DENSE(logits, N, V);
    check_vocabulary(OPERATION, vocab, V);
    if (N == 0)
        return;
    with_bool(is_aligned(logits, V), [&](auto aligned) {
        with_bool(backward, [&](auto gradient) {
            with_type(logits, [&](auto *p) {
                constexpr bool ALIGNED = decltype(aligned)::value,
                               BACKWARD = decltype(gradient)::value;
                launch<ALIGNED, BACKWARD>(InPlace<ALIGNED, std::remove_pointer_t<decltype(p)>>{}, p,
                                          logits, loss, zloss, target, weight, vocab, temperature,
                                          scale, z_weight);
            });
        });
    });
}

void backend_cross_entropy_codes(Tensor gradient, float amax, Tensor logits, float *loss,
                                 float *zloss, const int *target, const float *weight, int vocab,
                                 float temperature, float scale, float z_weight)
{
    const int N = logits.rows, V = logits.cols;
    CHECK_DENSE(logits, N, V);
    check_logit_codes(OPERATION, gradient, logits);
    check_vocabulary(OPERATION, vocab, V);
    check_code_rows(OPERATION, gradient);
    if (N == 0)
        return;
    with_bool(is_aligned(logits, V), [&](auto aligned) {
        with_type(logits, [&](auto *p) {
            launch<decltype(aligned)::value, true>(codes_of(gradient, amax), p, logits, loss, zloss,
                                                   target, weight, vocab, temperature, scale,
                                                   z_weight);
        });
    });
    clear_padding(gradient, N);
}
