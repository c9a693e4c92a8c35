/* From the q, k, v projection to attention: clamp, QK-norm, rotary position embedding. [Su et al.
 * 2021, in the half-split order of Hugging Face]
 *
 *     u = clamp(x)    h = u r w, r = 1/sqrt(mean(u^2) + eps)    (a', b') = (a cos - b sin, a sin + b cos)
 *
 * Backward: the rotation is orthogonal up to a factor, so its gradient rotates by the opposite
 * angle. norm.c derives the gradient of the norm. The clamp passes the gradients of elements that
 * it did not change. */
#include <math.h>

#include "kernels/cpu/cpu.h"

/* Clamps x to [-limit, limit], and keeps NaN, which fminf and fmaxf would replace. */
static float clamp(float x, float limit)
{
    return limit > 0 && fabsf(x) > limit ? copysignf(limit, x) : x;
}

static bool clamped(float x, float limit)
{
    return limit > 0 && fabsf(x) > limit;
}

/* Rotates each head of x (heads, D) by `sign` times the angles of one position, whose cosines and
 * sines are cosine_sine (D/2, 2). */
static void rotate(float *x, int heads, int D, const float *cosine_sine, float sign)
{
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < D / 2; i++) {
            float *p = x + (size_t)h * (size_t)D + i;
            float c = cosine_sine[2 * i], s = sign * cosine_sine[2 * i + 1], a = p[0], b = p[D / 2];
            p[0] = a * c - b * s;
            p[D / 2] = a * s + b * c;
        }
}

/* x = x r w. Returns r. */
static float norm_row(float *x, int width, const float *w, float eps)
{
    double square = 0;
    for (int i = 0; i < width; i++)
        square += (double)x[i] * x[i];
    float rstd = (float)(1 / sqrt(square / width + eps));
    for (int i = 0; i < width; i++)
        x[i] = x[i] * rstd * w[i];
    return rstd;
}

static void norm_rows(float *x, float *rstd, int rows, int width, const float *w, float eps)
{
    for (int i = 0; i < rows; i++)
        rstd[i] = norm_row(x + (size_t)i * (size_t)width, width, w, eps);
}

/* Replaces d, the gradient with respect to the norm's output, by the gradient with respect to its
 * input. Adds the gradient of w to dw unless dw is NULL. */
static void norm_row_backward(float *d, double *dw, const float *x, int width, float clip,
                              float rstd, const float *w)
{
    double mean_gh = 0;
    for (int i = 0; i < width; i++) {
        double h = (double)clamp(x[i], clip) * rstd;
        mean_gh += (double)d[i] * w[i] * h;
        if (dw)
            dw[i] += d[i] * h;
    }
    mean_gh /= width;
    for (int i = 0; i < width; i++) {
        double h = (double)clamp(x[i], clip) * rstd;
        d[i] = (float)(rstd * ((double)d[i] * w[i] - h * mean_gh));
    }
}

static void norm_rows_backward(float *d, double *dw, const float *x, int rows, int width,
                               float clip, const float *rstd, const float *w)
{
    for (int i = 0; i < rows; i++, d += width, x += width)
        norm_row_backward(d, dw, x, width, clip, rstd[i], w);
}

/* Computes y from x. Intermediate values stay in F32. */
static void rotate_rows(Tensor y, float *stats, Tensor x, bool by_head, Tensor qnorm, Tensor knorm,
                        Attention a)
{
    const int q_norms = by_head ? a.H : 1, k_norms = by_head ? a.K : 1;
    const int q_width = a.H * a.D, k_width = a.K * a.D, S = x.cols;
    const float *input = tensor_values(x, 0), *qw = tensor_values(qnorm, 1),
                *kw = tensor_values(knorm, 2);
    float *output = tensor_result(y, 3);
    for (int n = 0; n < x.rows; n++) {
        const float *from = input + (size_t)n * (size_t)S,
                    *angles = a.rope + (size_t)(n % a.T) * (size_t)a.D;
        float *q = output + (size_t)n * (size_t)S, *k = q + q_width;
        for (int i = 0; i < S; i++)
            q[i] = clamp(from[i], a.clip);
        if (qw) {
            norm_rows(q, stats, q_norms, q_width / q_norms, qw, a.norm.eps);
            norm_rows(k, stats + q_norms, k_norms, k_width / k_norms, kw, a.norm.eps);
            stats += q_norms + k_norms;
        }
        rotate(q, a.H, a.D, angles, 1);
        rotate(k, a.K, a.D, angles, 1);
    }
    tensor_finish(y, output);
}

void backend_rope_forward(Tensor y, Tensor saved, float *stats, Tensor x, LoraProduct product,
                          Tensor qnorm, Tensor knorm, Attention a, ForwardSource from)
{
    const bool by_head = check_rope("rope_forward", x, qnorm, knorm, stats, a);
    check_tensor("rope_forward", "y", y, x.rows, x.cols);
    if (product.xa.data)
        backend_lora_widen(x, product.xa, product.m, x);
    backend_quantize(saved, x);
    rotate_rows(y, stats, from == FROM_EXACT ? x : saved, by_head, qnorm, knorm, a);
}

void backend_rope_backward(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                           const float *stats, Tensor qnorm, Tensor knorm, Attention a)
{
    const bool by_head = check_rope(OPERATION, dy, qnorm, knorm, stats, a);
    const int q_width = a.H * a.D, k_width = a.K * a.D, S = dy.cols;
    const int q_norms = by_head ? a.H : 1, k_norms = by_head ? a.K : 1;
    CHECK_TENSOR(dx, dy.rows, dy.cols);
    CHECK_OPTIONAL(dqnorm, 1, q_width / q_norms);
    CHECK_OPTIONAL(dknorm, 1, k_width / k_norms);
    CHECK_PLAIN(dqnorm);
    CHECK_PLAIN(dknorm);
    const bool reads_x = a.clip > 0 || qnorm.data;
    if (reads_x)
        CHECK_TENSOR(x, dy.rows, S);
    const float *gradient = tensor_values(dy, 0), *input = reads_x ? tensor_values(x, 1) : NULL;
    const float *qw = tensor_values(qnorm, 2), *kw = tensor_values(knorm, 3);
    float *output = tensor_result(dx, 4), *dqw = tensor_values(dqnorm, 5),
          *dkw = tensor_values(dknorm, 6);
    double *q_sum = start_sum(dqnorm, dqw, 7), *k_sum = start_sum(dknorm, dkw, 8);
    for (int n = 0; n < dy.rows; n++) {
        const float *from = reads_x ? input + (size_t)n * (size_t)S : NULL;
        const float *angles = a.rope + (size_t)(n % a.T) * (size_t)a.D;
        float *q = output + (size_t)n * (size_t)S, *k = q + q_width;
        for (int i = 0; i < S; i++)
            q[i] = gradient[(size_t)n * (size_t)S + i];
        rotate(q, a.H, a.D, angles, -1);
        rotate(k, a.K, a.D, angles, -1);
        if (qw) {
            norm_rows_backward(q, q_sum, from, q_norms, q_width / q_norms, a.clip, stats, qw);
            norm_rows_backward(k, k_sum, from + q_width, k_norms, k_width / k_norms, a.clip,
                               stats + q_norms, kw);
            stats += q_norms + k_norms;
        }
        for (int i = 0; from && i < S; i++)
            q[i] = clamped(from[i], a.clip) ? 0 : q[i];
    }
    tensor_finish(dx, output);
    finish_sum(dqnorm, dqw, q_sum);
    finish_sum(dknorm, dkw, k_sum);
}
