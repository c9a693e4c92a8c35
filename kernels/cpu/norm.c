/* RMSNorm [Zhang & Sennrich 2019] and LayerNorm [Ba et al. 2016, without bias].
 *
 *     m = mean(x) (0 for RMS)    r = 1/sqrt(mean((x-m)^2) + eps)    h = (x-m) r    y = h w
 *
 * Backward, with g = dL/dh = dy w. h depends on x_j directly, through m, and through r, where
 * dr/dx_j = -r^2 h_j / C (the term of the mean vanishes, since sum(x-m) = 0):
 *     dL/dx_j = sum_i g_i (r delta_ij - [r/C] + (x_i-m) dr/dx_j) = r (g_j - [mean(g)] - h_j mean(g h)),
 * where the terms in [...] exist for LayerNorm only. */
#include <math.h>

#include "kernels/cpu/cpu.h"

static void row_stats(float *stats, const float *x, int C, Norm norm)
{
    double mean = 0, variance = 0;
    if (norm.kind == LAYER_NORM) {
        for (int c = 0; c < C; c++)
            mean += x[c];
        mean /= C;
    }
    for (int c = 0; c < C; c++)
        variance += (x[c] - mean) * (x[c] - mean);
    stats[0] = (float)mean;
    stats[1] = (float)(1 / sqrt(variance / C + norm.eps));
}

void backend_norm_forward(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w,
                          Tensor residual, Norm norm, ForwardSource from)
{
    const int N = stream.rows, C = stream.cols;
    CHECK_TENSOR(stream, N, C);
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(y, N, C);
    CHECK_OPTIONAL(w, 1, C);
    CHECK_OPTIONAL(residual, N, C);
    backend_quantize(x, stream);
    const float *input = tensor_values(from == FROM_EXACT ? stream : x, 0);
    const float *weight = tensor_values(w, 1), *add = tensor_values(residual, 2);
    float *output = tensor_result(y, 3);
    for (int n = 0; n < N; n++) {
        const size_t row = (size_t)n * (size_t)C;
        row_stats(stats + 2 * n, input + row, C, norm);
        const float mean = stats[2 * n], rstd = stats[2 * n + 1];
        for (int c = 0; c < C; c++) {
            float h = (input[row + c] - mean) * rstd * (weight ? weight[c] : 1);
            output[row + c] = add ? h + add[row + c] : h;
        }
    }
    tensor_finish(y, output);
}

void backend_norm_recompute(Tensor y, Tensor x, const float *stats, Tensor w)
{
    const int N = x.rows, C = x.cols;
    CHECK_TENSOR(x, N, C);
    CHECK_OPTIONAL(w, 1, C);
    CHECK(tensor_exists(y) && y.rows == N && y.cols == C,
          "norm_recompute: y is (%d, %d); expected (%d, %d)", y.rows, y.cols, N, C);
    const float *input = tensor_values(x, 0), *weight = tensor_values(w, 1);
    float *output = tensor_result(y, 3);
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * (size_t)C + (size_t)c;
            output[i] = (input[i] - stats[2 * n]) * stats[2 * n + 1] * (weight ? weight[c] : 1);
        }
    tensor_finish_scaled(y, output);
}

/* dx[0..C) = [dx +] gradient of one row. Adds the gradient of w to dw unless dw is NULL. */
static void row_backward(float *dx, double *dw, const float *dy, const float *x, const float *stats,
                         const float *w, int C, Norm norm, bool accumulate)
{
    const double mean = stats[0], rstd = stats[1];
    double sum_g = 0, sum_gh = 0;
    for (int c = 0; c < C; c++) {
        double h = (x[c] - mean) * rstd, g = w ? (double)dy[c] * w[c] : dy[c];
        sum_g += g;
        sum_gh += g * h;
        if (dw)
            dw[c] += dy[c] * h;
    }
    const double mean_g = norm.kind == LAYER_NORM ? sum_g / C : 0, mean_gh = sum_gh / C;
    for (int c = 0; c < C; c++) {
        double h = (x[c] - mean) * rstd, g = w ? (double)dy[c] * w[c] : dy[c];
        double d = rstd * (g - mean_g - h * mean_gh);
        dx[c] = (float)(accumulate ? dx[c] + d : d);
    }
}

void backend_norm_backward(Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x,
                           const float *stats, Tensor w, Norm norm, bool accumulate)
{
    const int N = dy.rows, C = dy.cols;
    CHECK_TENSOR(dy, N, C);
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(dx, N, C);
    CHECK_OPTIONAL(w, 1, C);
    CHECK_OPTIONAL(dw, 1, C);
    CHECK_PLAIN(dw);
    CHECK(!accumulate || dx.data != dy.data,
          "norm_backward: dx accumulates, so it must not have the memory of dy");
    CHECK(!amax || !format_is_fp8(dx.format),
          "norm_backward: amax is not NULL, but dx is %s; expected f32 or bf16",
          format_name(dx.format));
    if (accumulate)
        CHECK_PLAIN(dx);
    const float *gradient = tensor_values(dy, 0), *input = tensor_values(x, 1),
                *weight = tensor_values(w, 2);
    float *output = accumulate ? tensor_values(dx, 3) : tensor_result(dx, 3),
          *weight_gradient = tensor_values(dw, 4);
    double *sum = start_sum(dw, weight_gradient, 5);
    for (int n = 0; n < N; n++) {
        const size_t row = (size_t)n * (size_t)C;
        row_backward(output + row, sum, gradient + row, input + row, stats + 2 * n, weight, C, norm,
                     accumulate);
    }
    tensor_finish(dx, output);
    if (amax)
        *amax = abs_max(tensor_values(dx, 6), tensor_numel(dx));
    finish_sum(dw, weight_gradient, sum);
}
