/* MLPs of experts: rows, grouped GEMMs and SwiGLU. All operations read and write only the rows that
 * are in use, which are those below first[E]. A grouped GEMM is one GEMM of OpenBLAS for each
 * expert, with the operands of matmul.c, and without padding rows. */
#include <cblas.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* ---- tensors of assignments ------------------------------------------------------------------ */

/* Returns the rows of t that are in use, without a transposed copy. */
static Tensor in_use(Tensor t, Routing r)
{
    t.rows = r.first[r.experts];
    t.data_t = NULL;
    return t;
}

/* Fills the columns of t.data_t that belong to rows in use. */
static void transpose_in_use(Tensor t, Routing r)
{
    const uint8_t *codes = t.data;
    uint8_t *transposed = t.data_t;
    for (int row = 0; transposed && row < r.first[r.experts]; row++)
        for (int c = 0; c < t.cols; c++)
            transposed[(size_t)c * (size_t)t.rows + (size_t)row] =
                codes[(size_t)row * (size_t)t.cols + (size_t)c];
}

/* As tensor_finish, for the rows in use. */
static void finish(Tensor t, const float *values, Routing r)
{
    tensor_finish(in_use(t, r), values);
    transpose_in_use(t, r);
}

/* As tensor_finish_scaled, for the rows in use. */
static void finish_scaled(Tensor t, const float *values, Routing r)
{
    if (!t.data)
        t.data = cpu_scratch(SLOTS - 1, tensor_numel(t) / sizeof(float) + 1);
    tensor_finish_scaled(in_use(t, r), values);
    transpose_in_use(t, r);
}

/* Returns the number of rows of expert e, without padding. */
static int rows_of(Routing r, int e)
{
    int row = r.first[e];
    while (row < r.first[e + 1] && r.assignment[row] >= 0)
        row++;
    return row - r.first[e];
}

/* ---- rows ------------------------------------------------------------------------------------ */

void backend_experts_gather(Tensor y, Tensor x, const float *amax, Routing r)
{
    check_experts_gather(y, x, r);
    if (format_is_fp8(y.format) && amax)
        backend_quantize_scale_from(y, amax);
    else if (format_is_fp8(y.format))
        backend_quantize_scale(y, x);
    backend_experts_gather_again(y, x, r);
}

void backend_experts_gather_again(Tensor y, Tensor x, Routing r)
{
    check_experts_gather_again(y, x, r);
    const size_t C = (size_t)x.cols;
    const float *input = tensor_values(x, 0);
    float *output = tensor_result(in_use(y, r), 1);
    for (int row = 0; row < r.first[r.experts]; row++) {
        const int i = r.assignment[row];
        float *to = output + (size_t)row * C;
        if (i >= 0)
            memcpy(to, input + (size_t)(i / r.top_k) * C, C * sizeof *to);
        else
            memset(to, 0, C * sizeof *to);
    }
    finish_scaled(y, output, r);
}

void backend_experts_sum(Tensor y, Tensor x, Tensor add, Routing r)
{
    check_experts_sum(y, x, add, r);
    const size_t C = (size_t)x.cols;
    const float *input = tensor_values(x, 0), *start = tensor_values(add, 1);
    float *output = tensor_result(y, 2);
    for (int n = 0; n < r.tokens; n++)
        for (size_t c = 0; c < C; c++) {
            float sum = 0;
            for (int j = 0; j < r.top_k; j++)
                sum += input[(size_t)r.row[n * r.top_k + j] * C + c];
            output[(size_t)n * C + c] = start ? sum + start[(size_t)n * C + c] : sum;
        }
    tensor_finish(y, output);
}

/* ---- grouped GEMMs --------------------------------------------------------------------------- */

/* Returns the matrix of expert e in w. */
static Tensor matrix(Tensor w, int e, Routing r)
{
    const size_t first = (size_t)e * (tensor_numel(w) / (size_t)r.experts);
    w.rows /= r.experts;
    if (w.data)
        w.data = (char *)w.data + first * dtype_size(w.format.dtype);
    if (w.data_t)
        w.data_t = (char *)w.data_t + first;
    if (w.scale)
        w.scale = (float *)w.scale + SCALE_FLOATS * e;
    return w;
}

/* Zeros the padding rows of expert e. */
static void zero_padding(float *output, int cols, int e, Routing r)
{
    const int end = r.first[e] + rows_of(r, e);
    memset(output + (size_t)end * (size_t)cols, 0,
           (size_t)(r.first[e + 1] - end) * (size_t)cols * sizeof *output);
}

void backend_experts_matmul(Tensor y, Tensor x, Tensor w, Routing r)
{
    const int C = x.cols, O = y.cols;
    check_experts_matmul(y, x, w, r);
    const float *input = tensor_values(in_use(x, r), 0);
    float *output = tensor_result(in_use(y, r), 2);
    for (int e = 0; e < r.experts; e++) {
        const float *weight = tensor_values(matrix(w, e, r), 1);
        const size_t first = (size_t)r.first[e];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows_of(r, e), O, C, 1,
                    input + first * (size_t)C, C, weight, C, 0, output + first * (size_t)O, O);
        zero_padding(output, O, e, r);
    }
    finish(y, output, r);
}

void backend_experts_matmul_dx(Tensor dx, Tensor dy, Tensor w, Routing r)
{
    const int C = dx.cols, O = dy.cols;
    check_experts_matmul_dx(dx, dy, w, r);
    const float *gradient = tensor_values(in_use(dy, r), 0);
    float *output = tensor_result(in_use(dx, r), 2);
    for (int e = 0; e < r.experts; e++) {
        const Columns weight = tensor_columns(matrix(w, e, r), 1);
        const size_t first = (size_t)r.first[e];
        cblas_sgemm(CblasRowMajor, CblasNoTrans, weight.transposed ? CblasTrans : CblasNoTrans,
                    rows_of(r, e), C, O, 1, gradient + first * (size_t)O, O, weight.x, weight.ld, 0,
                    output + first * (size_t)C, C);
        zero_padding(output, C, e, r);
    }
    finish(dx, output, r);
}

/* Returns the elements of t from row `first` on. */
static const float *from_row(Columns t, int first)
{
    return t.x + (size_t)first * (t.transposed ? 1 : (size_t)t.ld);
}

void backend_experts_matmul_dw(Tensor dw, Tensor dy, Tensor x, Routing r)
{
    const int O = dy.cols, C = x.cols;
    if (!dw.data)
        return;
    check_experts_matmul_dw(dw, dy, x, r);
    const Columns gradient = tensor_columns(dy, 0), input = tensor_columns(x, 1);
    float *output = dw.empty ? tensor_result(dw, 2) : tensor_values(dw, 2);
    for (int e = 0; e < r.experts; e++) {
        const int rows = rows_of(r, e), first = r.first[e];
        float *matrix = output + (size_t)e * (size_t)O * (size_t)C;
        if (rows > 0)
            cblas_sgemm(CblasRowMajor, gradient.transposed ? CblasNoTrans : CblasTrans,
                        input.transposed ? CblasTrans : CblasNoTrans, O, C, rows, 1,
                        from_row(gradient, first), gradient.ld, from_row(input, first), input.ld,
                        dw.empty ? 0 : 1, matrix, C);
        else if (dw.empty)
            memset(matrix, 0, (size_t)O * (size_t)C * sizeof *matrix);
    }
    tensor_finish(dw, output);
}

/* ---- SwiGLU: swiglu.c has the formulas ------------------------------------------------------- */

/* Returns the weight of the assignment in a row; 0 for padding. */
static float weight_of(Routing r, int row)
{
    return r.assignment[row] >= 0 ? r.weight[r.assignment[row]] : 0;
}

void backend_experts_swiglu(Tensor act, Tensor gate_up, Tensor wide, Routing r, ForwardSource from)
{
    check_experts_swiglu(act, gate_up, wide, r);
    const Tensor exact = in_use(wide, r), saved = in_use(gate_up, r);
    const size_t F = (size_t)act.cols;
    backend_quantize(saved, exact);
    const float *input = tensor_values(from == FROM_EXACT ? exact : saved, 0);
    float *output = tensor_result(in_use(act, r), 1);
    for (int row = 0; row < exact.rows; row++) {
        const float weight = weight_of(r, row), *gate = input + (size_t)row * 2 * F, *up = gate + F;
        for (size_t f = 0; f < F; f++)
            output[(size_t)row * F + f] = weight * (gate[f] * sigmoid(gate[f]) * up[f]);
    }
    finish(act, output, r);
}

void backend_experts_matmul_swiglu(Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w,
                                   Routing r)
{
    backend_experts_matmul(wide, x, w, r);
    backend_experts_swiglu(act, gate_up, wide, r, FROM_EXACT);
}

void backend_experts_swiglu_backward(Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                                     Tensor gate_up, Routing r)
{
    check_experts_swiglu_backward(dgate_up, act, dweight, dact, gate_up, r);
    const size_t F = (size_t)dact.cols;
    const float *gradient = tensor_values(in_use(dact, r), 0),
                *input = tensor_values(in_use(gate_up, r), 1);
    float *output = tensor_result(in_use(dgate_up, r), 2), *recomputed = NULL;
    if (tensor_exists(act))
        recomputed = tensor_result(in_use(act, r), 3);
    for (int row = 0; row < r.first[r.experts]; row++) {
        const size_t wide = (size_t)row * 2 * F, narrow = (size_t)row * F;
        const float weight = weight_of(r, row);
        double sum = 0;
        for (size_t f = 0; f < F; f++) {
            const float g = input[wide + f], u = input[wide + F + f], d = gradient[narrow + f],
                        s = sigmoid(g), dw = d * weight;
            output[wide + f] = dw * u * s * (1 + g * (1 - s));
            output[wide + F + f] = dw * g * s;
            sum += (double)d * (g * s * u);
            if (recomputed)
                recomputed[narrow + f] = weight * (g * s * u);
        }
        dweight[row] = (float)sum;
    }
    finish(dgate_up, output, r);
    if (recomputed)
        finish_scaled(act, recomputed, r);
}

void backend_experts_matmul_dx_swiglu(Tensor dgate_up, Tensor act, float *dweight, Tensor dact,
                                      Tensor dy, Tensor w, Tensor gate_up, Routing r)
{
    backend_experts_matmul_dx(dact, dy, w, r);
    backend_experts_swiglu_backward(dgate_up, act, dweight, dact, gate_up, r);
}
