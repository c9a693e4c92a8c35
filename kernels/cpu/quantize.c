/* From one format to another.
 *
 * Blocks of whole groups are loaded, converted and stored, so that a unit of 1e9 elements needs no copy as floats. */
#include <math.h>

#include "kernels/cpu/cpu.h"

enum { BLOCK = 4096 };

/* Elements per step: whole groups of both tensors. */
static size_t block_size(Tensor y, Tensor x)
{
    size_t gy = y.format.group ? (size_t)y.format.group : 1, gx = x.format.group ? (size_t)x.format.group : 1;
    size_t step = gy * gx;
    return step >= BLOCK ? step : BLOCK / step * step;
}

static void set_tensor_scale(Tensor y, Tensor x, float *values, size_t block)
{
    float amax = 0;
    for (size_t i = 0, numel = tensor_numel(x); i < numel; i += block) {
        size_t n = numel - i < block ? numel - i : block;
        load(values, x, i, n);
        amax = fmaxf(amax, abs_max(values, n));
    }
    *(float *)y.scale = fp8_scale(amax, y.format.dtype);
}

void quantize_scale(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK(format_is_fp8(y.format) && !y.format.group && y.scale, "quantize_scale: y is %s", format_name(y.format));
    const size_t block = block_size(y, x);
    set_tensor_scale(y, x, scratch(0, block), block);
}

void quantize_codes(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK(y.rows == x.rows && y.cols == x.cols, "quantize_codes: (%d, %d) from (%d, %d)", y.rows, y.cols, x.rows,
          x.cols);
    const size_t block = block_size(y, x), numel = tensor_numel(x);
    float *values = scratch(0, block);
    if (!y.data)        /* only the transpose is wanted: it is made from the rows */
        y.data = scratch(1, numel / sizeof(float) + 1);
    for (size_t i = 0; i < numel; i += block) {
        size_t n = numel - i < block ? numel - i : block;
        load(values, x, i, n);
        store(y, i, values, n);
    }
    transpose_codes(y);
}

/* Same FP8 format, one scale each: the codes and the scale are copied, so that nothing is rounded twice. */
static bool is_copy(Tensor y, Tensor x)
{
    return format_is_fp8(y.format) && !y.format.group && format_equal(y.format, x.format);
}

void quantize(Tensor y, Tensor x)
{
    CHECK_TENSOR(x, x.rows, x.cols);
    CHECK_TENSOR(y, x.rows, x.cols);
    if (y.data == x.data) {
        CHECK(format_equal(y.format, x.format), "quantize: %s and %s in the same memory", format_name(y.format),
              format_name(x.format));
        return;
    }
    if (is_copy(y, x))
        *(float *)y.scale = *(const float *)x.scale;
    else if (format_is_fp8(y.format) && !y.format.group)
        quantize_scale(y, x);
    quantize_codes(y, x);
}
