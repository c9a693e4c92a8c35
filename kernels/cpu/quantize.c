/* Conversions between formats.
 *
 * The functions convert blocks of whole groups. So a tensor of 1e9 elements needs no copy as
 * floats. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { BLOCK = 4096 };

/* Returns the elements per step, which are whole groups of both tensors. */
static size_t block_size(Tensor y, Tensor x)
{
    size_t gy = y.format.group ? (size_t)y.format.group : 1,
           gx = x.format.group ? (size_t)x.format.group : 1;
    size_t step = gy * gx;
    return step >= BLOCK ? step : BLOCK / step * step;
}

void backend_quantize_scale_from(Tensor y, const float *amax)
{
    check_scaled(y);
    *(float *)y.scale = scale_within_range(y, *amax);
}

void backend_quantize_scale(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    const size_t block = block_size(y, x), numel = tensor_numel(x);
    float *values = cpu_scratch(0, block), amax = 0;
    for (size_t i = 0; i < numel; i += block) {
        size_t n = numel - i < block ? numel - i : block;
        tensor_load(values, x, i, n);
        amax = fmaxf(amax, abs_max(values, n));
    }
    backend_quantize_scale_from(y, &amax);
}

void backend_quantize_codes(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    check_quantized(y, x);
    const size_t block = block_size(y, x), numel = tensor_numel(x);
    float *values = cpu_scratch(0, block);
    if (!y.data) /* only data_t is requested, but it is computed from data */
        y.data = cpu_scratch(1, tensor_numel(y) / sizeof(float) + 1);
    for (size_t i = 0; i < numel; i += block) {
        size_t n = numel - i < block ? numel - i : block;
        tensor_load(values, x, i, n);
        tensor_store(y, i, values, n);
    }
    if (y.rows > x.rows)
        memset((uint8_t *)y.data + numel, 0, tensor_numel(y) - numel);
    transpose_codes(y);
}

void backend_quantize_item_scales(Tensor y, Tensor x, int items)
{
    check_items(OPERATION, y, x, items);
    for (int i = 0; i < items; i++)
        backend_quantize_scale(tensor_item(y, i, items), tensor_item(x, i, items));
}

void backend_quantize_item_codes(Tensor y, Tensor x, int items)
{
    check_items(OPERATION, y, x, items);
    for (int i = 0; i < items; i++)
        backend_quantize_codes(tensor_item(y, i, items), tensor_item(x, i, items));
}

void backend_expand_operand(Tensor y, Tensor x)
{
    check_expand_operand(y, x);
    backend_quantize_codes(y, x);
    transpose_codes(x);
}

void backend_quantize_in_range(Tensor y, Tensor x)
{
    backend_quantize_scale(y, x);
    backend_quantize_codes(y, x);
}
