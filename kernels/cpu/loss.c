/* Cross entropy with z-loss [Chowdhery et al. 2022, sec. 5], and its gradient, which replaces the
 * logits or is written as FP8 codes.
 *
 *     x = logits / temperature    z = log sum_j exp(x_j)    loss = z - x_t    zloss = z^2
 *     dz/dx_j = p_j = exp(x_j - z), so d(loss + a zloss)/dx_j = (1 + 2 a z) p_j - [j = t] */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* Replaces x by exp(x - max) and sets *total to the sum of these exponentials. Returns z. */
static double exponentials(float *x, int n, double *total)
{
    float max = -INFINITY;
    double sum = 0;
    for (int j = 0; j < n; j++)
        max = x[j] > max ? x[j] : max;
    for (int j = 0; j < n; j++)
        x[j] = expf(x[j] - max);
    for (int j = 0; j < n; j++)
        sum += x[j];
    *total = sum;
    return max + log(sum);
}

/* Replaces x by the gradient. On entry x is exp(logit - max) of a row, and `total` is the sum of
 * the row. */
static void row_gradient(float *x, double total, int vocab, int V, int target, double z,
                         float scale, float z_weight)
{
    const double factor = scale * (1 + 2.0 * z_weight * z) / total,
                 at_target = factor * x[target] - scale;
    for (int j = 0; j < vocab; j++)
        x[j] *= (float)factor;
    for (int j = vocab; j < V; j++)
        x[j] = 0;
    x[target] = (float)at_target;
}

/* gradient: the logits, or FP8 codes whose scale is set, or an absent tensor. Its columns after the
 * last column of the logits become 0. weight: factor of each row's gradient; NULL: 1. */
static void all_rows(const char *op, Tensor gradient, Tensor logits, float *loss, float *zloss,
                     const int *target, const float *weight, int vocab, float temperature,
                     float scale, float z_weight)
{
    const int N = logits.rows, V = logits.cols, width = gradient.data ? gradient.cols : V;
    check_tensor(op, "logits", logits, N, V);
    check_plain(op, "logits", logits);
    CHECK(vocab > 0 && vocab <= V, "%s: a vocabulary of %d in %d columns", op, vocab, V);
    const float inverse = 1 / temperature;
    scale *= inverse;
    float *row = cpu_scratch(0, (size_t)width);
    for (int n = 0; n < N; n++) {
        loss[n] = zloss[n] = 0;
        CHECK(target[n] < vocab, "%s: target %d of row %d; the vocabulary has %d ids", op,
              target[n], n, vocab);
        if (target[n] >= 0) {
            tensor_load(row, logits, (size_t)n * (size_t)V, (size_t)V);
            for (int j = 0; j < vocab; j++)
                row[j] *= inverse;
            const double target_logit = row[target[n]];
            double total, z = exponentials(row, vocab, &total);
            loss[n] = (float)(z - target_logit);
            zloss[n] = (float)(z * z);
            if (gradient.data)
                row_gradient(row, total, vocab, width, target[n], z,
                             weight ? scale * weight[n] : scale, z_weight);
        } else
            for (int j = 0; j < width; j++)
                row[j] = 0;
        if (gradient.data)
            tensor_store(gradient, (size_t)n * (size_t)width, row, (size_t)width);
    }
}

void backend_cross_entropy(Tensor logits, float *loss, float *zloss, const int *target,
                           const float *weight, int vocab, float temperature, float scale,
                           float z_weight, bool backward)
{
    all_rows(OPERATION, backward ? logits : (Tensor){ 0 }, logits, loss, zloss, target, weight,
             vocab, temperature, scale, z_weight);
}

void backend_cross_entropy_codes(Tensor gradient, float amax, Tensor logits, float *loss,
                                 float *zloss, const int *target, const float *weight, int vocab,
                                 float temperature, float scale, float z_weight)
{
    check_logit_codes(OPERATION, gradient, logits);
    *(float *)gradient.scale = fp8_scale(amax, gradient.format.dtype);
    all_rows(OPERATION, gradient, logits, loss, zloss, target, weight, vocab, temperature, scale,
             z_weight);
    const size_t written = (size_t)logits.rows * (size_t)gradient.cols;
    memset((uint8_t *)gradient.data + written, 0, tensor_numel(gradient) - written);
}
