/* Sums over all elements of a tensor, in F64 and in the order of the elements, so their bits depend
 * only on the values. Also the elementwise sum and mean of tensors. */
#include "kernels/cpu/cpu.h"

void backend_sum_values(float *out, const float *x, size_t n)
{
    double total = *out;
    for (size_t i = 0; i < n; i++)
        total += x[i];
    *out = (float)total;
}

void backend_sum_squares(float *out, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    const size_t numel = tensor_numel(x), block = x.format.group ? (size_t)x.cols : 4096;
    float *values = cpu_scratch(0, block);
    double total = *out;
    for (size_t first = 0; first < numel; first += block) {
        size_t n = numel - first < block ? numel - first : block;
        tensor_load(values, x, first, n);
        for (size_t i = 0; i < n; i++)
            total += (double)values[i] * values[i];
    }
    *out = (float)total;
}

void backend_accumulate(Tensor y, Tensor x)
{
    enum { BLOCK = 4096 };
    CHECK_TENSOR(y, x.rows, x.cols);
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_PLAIN(y);
    CHECK_PLAIN(x);
    float *sum = cpu_scratch(0, BLOCK), *values = cpu_scratch(1, BLOCK);
    for (size_t first = 0, numel = tensor_numel(x); first < numel; first += BLOCK) {
        const size_t n = numel - first < BLOCK ? numel - first : BLOCK;
        tensor_load(sum, y, first, n);
        tensor_load(values, x, first, n);
        for (size_t i = 0; i < n; i++)
            sum[i] += values[i];
        tensor_store(y, first, sum, n);
    }
}

void backend_average_weights(Tensor mean, Tensor w, float share)
{
    enum { BLOCK = 4096 };
    CHECK_TENSOR(mean, w.rows, w.cols);
    CHECK_TENSOR(w, w.rows, w.cols);
    CHECK(mean.format.dtype == F32, "average_weights: mean is %s, expected f32",
          format_name(mean.format));
    float *m = mean.data, *x = cpu_scratch(0, BLOCK);
    for (size_t first = 0, numel = tensor_numel(w); first < numel; first += BLOCK) {
        const size_t n = numel - first < BLOCK ? numel - first : BLOCK;
        tensor_load(x, w, first, n);
        for (size_t i = 0; i < n; i++)
            m[first + i] = share == 1 ? x[i] : m[first + i] + share * (x[i] - m[first + i]);
    }
}
