/* Distillation (formulas: cpu/distill.c). A block computes one row. The first pass sums the
 * exponentials; then thread i computes label i; the second pass writes the gradient of all columns
 * as if they had no soft labels; and then thread i overwrites the column of label i. The second pass
 * reads the row from the L2 cache. Bytes per logit in BF16: 4 from memory. */
#include "kernels/cuda/loss.cuh"

enum { DISTILL_THREADS = MOST_SOFT };

struct Sums {
    Running plain, divided; /* of the logits, and of the logits / temperature */
};

template <bool ALIGNED, typename T>
__device__ static inline Sums sum_row(const T *row, int vocab, int V, float base2, float *shared)
{
    Running plain = { -FLT_MAX, 0 }, divided = { -FLT_MAX, 0 };
    for (int c = 8 * threadIdx.x; c < vocab; c += 8 * DISTILL_THREADS) {
        const Pack<T> pack = load_pack<ALIGNED>(row + c, V - c);
        add_pack(plain, pack, vocab - c, LOG2E);
        if (base2 != LOG2E)
            add_pack(divided, pack, vocab - c, base2);
    }
    plain = block_total(plain, LOG2E, shared);
    return { plain, base2 == LOG2E ? plain : block_total(divided, base2, shared) };
}

/* One outcome's part of the divergence: its value, q r, and r (weighted by q for a label). */
struct Outcome {
    float value, weighted, slope;
};

__device__ static inline Outcome outcome(bool reverse, float q, float log_q, float t)
{
    const float ratio = t > 0 ? log_q - logf(t) : 0;
    if (reverse)
        return { q * ratio, q * ratio, ratio };
    return { -t * ratio, -t, -t / q };
}

/* logits: the chunk; rows of labels and results are those of the block. */
template <bool ALIGNED, bool BACKWARD, class Gradient, typename T>
__global__ __launch_bounds__(DISTILL_THREADS) void distill_kernel(Gradient gradient, T *logits,
                                                                  float *loss, float *divergence,
                                                                  const int *targets,
                                                                  SoftLabels labels, Distillation d,
                                                                  int V, int vocab, float scale)
{
    __shared__ float shared[4 * 32];
    T *row = logits + (size_t)blockIdx.x * V;
    const int target = targets[blockIdx.x], i = threadIdx.x;
    if (target < 0) {
        if (threadIdx.x == 0)
            loss[blockIdx.x] = divergence[blockIdx.x] = 0;
        if (BACKWARD)
            store_zeros(gradient, gradient.begin(row, V), V);
        return;
    }
    const float inverse = 1 / d.temperature, base2 = LOG2E * inverse,
                target_logit = to_float(row[target]);
    const Sums s = sum_row<ALIGNED>(row, vocab, V, base2, shared);
    const float z = s.plain.max + logf(s.plain.total),
                zt = s.divided.max * inverse + logf(s.divided.total);

    const size_t at = (size_t)blockIdx.x * labels.k + i;
    const int column = i < labels.k ? labels.column[at] : -1;
    float sums[4] = {}, q = 0, p = 0, slope = 0; /* sums: value, S, q, number of labels */
    if (column >= 0) {
        const float x = to_float(row[column]), t = labels.probability[at], log_q = x * inverse - zt;
        q = expf(log_q), p = expf(x - z);
        const Outcome o = outcome(d.reverse, q, log_q, t);
        slope = d.reverse ? o.slope * q : -t;
        sums[0] = o.value, sums[1] = o.weighted, sums[2] = q, sums[3] = 1;
    }
    block_sums(sums, shared);
    float other = 0, value = 0;
    if (sums[3] > 0) {
        const float tail = labels.tail[blockIdx.x], rest = fmaxf(1 - sums[2], LEAST_TAIL),
                    t = tail >= LEAST_TAIL ? tail
                        : d.reverse        ? LEAST_TAIL
                                           : 0.0f;
        const Outcome o = outcome(d.reverse, rest, logf(rest), t);
        value = sums[0] + o.value;
        slope -= (sums[1] + o.weighted) * q;
        other = o.slope - (sums[1] + o.weighted);
    }
    if (threadIdx.x == 0) {
        loss[blockIdx.x] = z - target_logit;
        divergence[blockIdx.x] = value;
    }
    if (!BACKWARD)
        return;

    const float ce = scale * d.ce, kl = scale * d.kl * d.temperature, rest = kl * other,
                shift = -z * LOG2E, shift_t = -zt * LOG2E;
    auto *to = gradient.begin(row, V);
    for (int c = 8 * threadIdx.x; c < V; c += 8 * DISTILL_THREADS) {
        const Pack<T> pack = load_pack<ALIGNED>(row + c, V - c);
        float g[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            g[j] = ce * exp2_quick(fmaf(pack[j], LOG2E, shift)) +
                   rest * exp2_quick(fmaf(pack[j], base2, shift_t));
            g[j] = c + j >= vocab ? 0.0f : c + j == target ? g[j] - ce : g[j];
        }
        gradient.store(to + c, g, V - c);
    }
    __syncthreads();
    if (column >= 0)
        gradient.store_one(to + column, ce * (p - (column == target)) + kl * slope);
}

template <bool BACKWARD, class Gradient, typename T>
static void launch(Gradient gradient, T *p, Tensor logits, float *loss, float *divergence,
                   const int *target, SoftLabels labels, Distillation d, int vocab, float scale)
{
    with_bool(is_aligned(logits, logits.cols), [&](auto aligned) {
        distill_kernel<decltype(aligned)::value, BACKWARD>
            <<<logits.rows, DISTILL_THREADS, 0, device_stream()>>>(
                gradient, p, loss, divergence, target, labels, d, logits.cols, vocab, scale);
    });
    LAUNCH_CHECK();
}

void backend_distill(Tensor gradient, float amax, Tensor logits, float *loss, float *divergence,
                     const int *target, SoftLabels labels, Distillation d, int vocab, float scale)
{
    check_soft_labels(OPERATION, gradient, logits, labels.k, vocab);
    const bool fp8 = format_is_fp8(gradient.format) && gradient.data;
    if (fp8)
        check_code_rows(OPERATION, gradient);
    if (logits.rows == 0)
        return;
    with_type(logits, [&](auto *p) {
        using T = std::remove_pointer_t<decltype(p)>;
        if (fp8)
            launch<true>(codes_of(gradient, amax), p, logits, loss, divergence, target, labels, d,
                         vocab, scale);
        else
            with_bool(is_aligned(logits, logits.cols), [&](auto aligned) {
                with_bool(gradient.data != NULL, [&](auto backward) {
                    launch<decltype(backward)::value>(InPlace<decltype(aligned)::value, T>{}, p,
                                                      logits, loss, divergence, target, labels, d,
                                                      vocab, scale);
                });
            });
    });
    if (fp8)
        clear_padding(gradient, logits.rows);
}
