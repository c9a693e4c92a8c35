/* Sums over all elements, in double: the bits depend only on the values. */
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
