/* Distillation: losses of soft labels, and their gradient.
 *
 * The divergence compares two distributions over the labels' columns and the tail: q of the model
 * and t of the labels. With r_i = d(divergence)/d(q_i) and S = sum_i q_i r_i, its derivative by x =
 * logits / temperature is
 *
 *     q_j (r_j - S) for a column j of the labels    p_j (r_tail - S) for any other column
 *
 *     KL(t || q) = sum t log(t / q)    r = -t / q              S = -sum t
 *     KL(q || t) = sum q log(q / t)    r = log(q / t) + 1, whose 1 cancels    S = KL */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static double log_sum_exp(const float *x, int n, double temperature)
{
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++)
        max = fmax(max, x[j]);
    for (int j = 0; j < n; j++)
        sum += exp((x[j] - max) / temperature);
    return max / temperature + log(sum);
}

/* One outcome's part of the divergence: its value, q r, and r. */
typedef struct {
    double value, weighted, slope;
} Outcome;

static Outcome outcome(bool reverse, double q, double log_q, double t)
{
    const double ratio = t > 0 ? log_q - log(t) : 0;
    if (reverse)
        return (Outcome){ q * ratio, q * ratio, ratio };
    return (Outcome){ -t * ratio, -t, -t / q };
}

/* What a row's gradient needs: slopes[i] is q_i (r_i - S) of label i, and `other` is r_tail - S. */
typedef struct {
    double value, other;
} Divergence;

static Divergence divergence_of(double *slopes, const float *x, double z, const int *column,
                                const float *t, float tail, int k, Distillation d)
{
    const double least = LEAST_TAIL;
    double value = 0, S = 0, inside = 0;
    bool any = false;
    for (int i = 0; i < k; i++) {
        slopes[i] = 0;
        if (column[i] < 0)
            continue;
        const double log_q = x[column[i]] / d.temperature - z, q = exp(log_q);
        const Outcome o = outcome(d.reverse, q, log_q, t[i]);
        slopes[i] = d.reverse ? o.slope * q : -t[i];
        value += o.value, S += o.weighted, inside += q;
        any = true;
    }
    if (!any)
        return (Divergence){ 0, 0 };
    const double q = fmax(1 - inside, least), t_tail = tail >= least ? tail : d.reverse ? least : 0;
    const Outcome o = outcome(d.reverse, q, log(q), t_tail);
    value += o.value, S += o.weighted;
    for (int i = 0; i < k; i++)
        if (column[i] >= 0)
            slopes[i] -= S * exp(x[column[i]] / d.temperature - z);
    return (Divergence){ value, o.slope - S };
}

/* Replaces the logits x of a row by the gradient. z: log sum exp of x and of x / temperature. */
static void row_gradient(float *x, int vocab, int V, int target, const double z[2],
                         const int *column, const double *slopes, double other, int k,
                         Distillation d, double scale)
{
    const double ce = scale * d.ce, kl = scale * d.kl * d.temperature;
    double *label = (double *)cpu_scratch(2, 2 * MOST_SOFT);
    for (int i = 0; i < k; i++)
        if (column[i] >= 0)
            label[i] = ce * (exp(x[column[i]] - z[0]) - (column[i] == target)) + kl * slopes[i];
    for (int j = 0; j < vocab; j++)
        x[j] = (float)(ce * (exp(x[j] - z[0]) - (j == target)) +
                       (kl * other != 0 ? kl * other * exp(x[j] / d.temperature - z[1]) : 0));
    for (int j = vocab; j < V; j++)
        x[j] = 0;
    for (int i = 0; i < k; i++)
        if (column[i] >= 0)
            x[column[i]] = (float)label[i];
}

void backend_distill(Tensor gradient, float amax, Tensor logits, float *loss, float *divergence,
                     const int *target, SoftLabels labels, Distillation d, int vocab, float scale)
{
    const int N = logits.rows, V = logits.cols, width = gradient.data ? gradient.cols : V,
              k = labels.k;
    check_soft_labels(OPERATION, gradient, logits, k, vocab);
    if (format_is_fp8(gradient.format))
        *(float *)gradient.scale = fp8_scale(amax, gradient.format.dtype);
    float *x = cpu_scratch(0, (size_t)width);
    double *slopes = (double *)cpu_scratch(1, 2 * MOST_SOFT);
    for (int n = 0; n < N; n++) {
        const int *column = labels.column + (size_t)n * (size_t)k;
        loss[n] = divergence[n] = 0;
        CHECK(target[n] < vocab, "%s: target %d at %d; the vocabulary is %d", OPERATION, target[n],
              n, vocab);
        memset(x, 0, sizeof *x * (size_t)width);
        if (target[n] >= 0) {
            tensor_load(x, logits, (size_t)n * (size_t)V, (size_t)V);
            const double z[2] = { log_sum_exp(x, vocab, 1), log_sum_exp(x, vocab, d.temperature) };
            const Divergence v =
                divergence_of(slopes, x, z[1], column, labels.probability + (size_t)n * (size_t)k,
                              labels.tail[n], k, d);
            loss[n] = (float)(z[0] - x[target[n]]);
            divergence[n] = (float)v.value;
            if (gradient.data)
                row_gradient(x, vocab, width, target[n], z, column, slopes, v.other, k, d, scale);
        }
        if (gradient.data)
            tensor_store(gradient, (size_t)n * (size_t)width, x, (size_t)width);
    }
    if (format_is_fp8(gradient.format)) {
        const size_t written = (size_t)N * (size_t)width;
        memset((uint8_t *)gradient.data + written, 0, tensor_numel(gradient) - written);
    }
}
