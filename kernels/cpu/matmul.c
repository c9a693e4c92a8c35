/* The three GEMMs of a linear layer, by OpenBLAS in F32. Its threads split rows and columns of the result, never a
 * sum, so the bits depend on the number of threads at most, and not on the run. */
#include <cblas.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

void matmul(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const int N = x.rows, C = x.cols, O = w.rows;
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(w, O, C);
    CHECK_TENSOR(y, N, O);
    CHECK_OPTIONAL(add, N, O);
    CHECK(y.data != x.data && y.data != w.data, "matmul: y is an input");
    const float *input = tensor_values(x, 0), *weight = tensor_values(w, 1), *start = tensor_values(add, 2);
    float *output = tensor_result(y, 3);
    if (start && start != output)
        memcpy(output, start, tensor_numel(y) * sizeof *output);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, O, C, 1, input, C, weight, C, start ? 1 : 0, output, O);
    tensor_finish(y, output);
}

void matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate)
{
    const int N = dy.rows, O = w.rows, C = w.cols;
    CHECK_TENSOR(dy, N, O);
    CHECK_TENSOR(w, O, C);
    CHECK_TENSOR(dx, N, C);
    CHECK(dx.data != dy.data && dx.data != w.data, "matmul_dx: dx is an input");
    if (accumulate)
        CHECK_PLAIN(dx);
    const float *gradient = tensor_values(dy, 0), *weight = tensor_values(w, 1);
    float *output = accumulate ? tensor_values(dx, 3) : tensor_result(dx, 3);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, C, O, 1, gradient, O, weight, C, accumulate ? 1 : 0,
                output, C);
    tensor_finish(dx, output);
}

void matmul_dw(Tensor dw, Tensor dy, Tensor x)
{
    const int N = dy.rows, O = dy.cols, C = x.cols;
    CHECK_TENSOR(dy, N, O);
    CHECK_TENSOR(x, N, C);
    CHECK_TENSOR(dw, O, C);
    CHECK_PLAIN(dw);
    CHECK(dw.data != dy.data && dw.data != x.data, "matmul_dw: dw is an input");
    const float *gradient = tensor_values(dy, 0), *input = tensor_values(x, 1);
    float *output = tensor_values(dw, 3);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, O, C, N, 1, gradient, O, input, C, 1, output, C);
    tensor_finish(dw, output);
}
