/* Rows of images: GELU between the two layers of the projector, and copies of rows between the
 * residual stream and a list of rows.
 *
 *     gelu(x) = x P(x), P(x) = (1 + erf(x / sqrt 2)) / 2        gelu'(x) = P(x) + x exp(-x^2 / 2) / sqrt(2 pi) */
#include <math.h>

#include "kernels/cpu/cpu.h"

static float probability(float x)
{
    return 0.5f * (1 + erff(x * 0.70710678f));
}

void backend_gelu_forward(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_TENSOR(y, x.rows, x.cols);
    const float *input = tensor_values(x, 0);
    float *output = tensor_result(y, 1);
    for (size_t i = 0; i < tensor_numel(x); i++)
        output[i] = input[i] * probability(input[i]);
    tensor_finish(y, output);
}

void backend_gelu_backward(Tensor dx, Tensor dy, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_TENSOR(dy, x.rows, x.cols);
    CHECK_TENSOR(dx, x.rows, x.cols);
    const float *input = tensor_values(x, 0), *gradient = tensor_values(dy, 1);
    float *output = tensor_result(dx, 2);
    for (size_t i = 0; i < tensor_numel(x); i++) {
        const float v = input[i], density = 0.39894228f * expf(-0.5f * v * v);
        output[i] = gradient[i] * (probability(v) + v * density);
    }
    tensor_finish(dx, output);
}

static void check_row(int at, Tensor y)
{
    CHECK(at < y.rows, "row %d of the stream, which has %d rows", at, y.rows);
}

void backend_place_rows(Tensor y, const int *at, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_TENSOR(y, y.rows, x.cols);
    CHECK_PLAIN(y);
    const size_t C = (size_t)x.cols;
    float *row = cpu_scratch(0, C);
    for (int i = 0; i < x.rows; i++) {
        check_row(at[i], y);
        if (at[i] < 0)
            continue;
        tensor_load(row, x, (size_t)i * C, C);
        tensor_store(y, (size_t)at[i] * C, row, C);
    }
}

void backend_take_rows(Tensor x, const int *at, Tensor y)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_TENSOR(y, y.rows, x.cols);
    CHECK_PLAIN(x);
    CHECK_PLAIN(y);
    const size_t C = (size_t)x.cols;
    float *row = cpu_scratch(0, C), *zero = cpu_scratch(1, C);
    for (size_t c = 0; c < C; c++)
        zero[c] = 0;
    for (int i = 0; i < x.rows; i++) {
        check_row(at[i], y);
        if (at[i] < 0) {
            tensor_store(x, (size_t)i * C, zero, C);
            continue;
        }
        tensor_load(row, y, (size_t)at[i] * C, C);
        tensor_store(x, (size_t)i * C, row, C);
        tensor_store(y, (size_t)at[i] * C, zero, C);
    }
}
