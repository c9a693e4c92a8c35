/* The three GEMMs of a linear layer, by OpenBLAS in F32, and the gradient of its bias. OpenBLAS's
 * threads split rows and columns of the result, never a sum. So the bits may depend on the number
 * of threads, but are the same in every run.
 *
 * FP8 operands must be contiguous along the summed dimension, as for Hopper's tensor cores: matmul
 * reads `data` of both operands, matmul_dx reads data_t of w, and matmul_dw reads data_t of dy and
 * x. The copy that an operation does not read may be stale. */
#include <cblas.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

Columns tensor_columns(Tensor t, int slot)
{
    if (!format_is_fp8(t.format))
        return (Columns){ tensor_values(t, slot), false, t.cols };
    Tensor transposed = {
        .data = t.data_t, .scale = t.scale, .format = t.format, .rows = t.cols, .cols = t.rows
    };
    float *x = tensor_values(transposed, slot);
    for (size_t i = 0; t.channel && i < tensor_numel(transposed); i++)
        x[i] /= t.channel[i / (size_t)t.rows];
    return (Columns){ x, true, t.rows };
}

void backend_matmul(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const int N = x.rows, C = x.cols, O = w.rows;
    check_matmul(y, x, w, add);
    const float *input = tensor_values(x, 0), *weight = tensor_values(w, 1),
                *start = tensor_values(add, 2);
    float *output = tensor_result(y, 3);
    if (is_bias(add, y))
        for (int n = 0; n < N; n++)
            memcpy(output + (size_t)n * (size_t)O, start, (size_t)O * sizeof *output);
    else if (start && start != output)
        memcpy(output, start, tensor_numel(y) * sizeof *output);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, O, C, 1, input, C, weight, C,
                start ? 1 : 0, output, O);
    tensor_finish(y, output);
}

void backend_matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate)
{
    const int N = dy.rows, O = w.rows, C = w.cols;
    check_matmul_dx(dx, dy, w, accumulate);
    const float *gradient = tensor_values(dy, 0);
    const Columns weight = tensor_columns(w, 1);
    float *output = accumulate ? tensor_values(dx, 3) : tensor_result(dx, 3);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, weight.transposed ? CblasTrans : CblasNoTrans, N, C, O,
                1, gradient, O, weight.x, weight.ld, accumulate ? 1 : 0, output, C);
    tensor_finish(dx, output);
}

void backend_matmul_dw(Tensor dw, Tensor dy, Tensor x)
{
    const int N = dy.rows, O = dy.cols, C = x.cols;
    if (!dw.data)
        return;
    check_matmul_dw(dw, dy, x);
    const Columns gradient = tensor_columns(dy, 0), input = tensor_columns(x, 1);
    float *output = dw.empty ? tensor_result(dw, 3) : tensor_values(dw, 3);
    cblas_sgemm(CblasRowMajor, gradient.transposed ? CblasNoTrans : CblasTrans,
                input.transposed ? CblasTrans : CblasNoTrans, O, C, N, 1, gradient.x, gradient.ld,
                input.x, input.ld, dw.empty ? 0 : 1, output, C);
    tensor_finish(dw, output);
}

void backend_matmul_db(Tensor db, Tensor dy)
{
    if (!db.data)
        return;
    check_matmul_db(db, dy);
    const float *gradient = tensor_values(dy, 0);
    float *output = tensor_values(db, 1);
    double *sum = start_sum(db, output, 2);
    for (int n = 0; n < dy.rows; n++)
        for (int o = 0; o < dy.cols; o++)
            sum[o] += gradient[(size_t)n * (size_t)dy.cols + (size_t)o];
    finish_sum(db, output, sum);
}
