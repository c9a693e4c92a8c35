/* Conversion of whole tensors to floats, and of floats to the formats of tensors. */
#include "kernels/cpu/cpu.h"

bool knows_group(int group, bool moment)
{
    (void)group, (void)moment;
    return true;
}

float *tensor_values(Tensor t, int slot)
{
    if (!t.data || t.format.dtype == F32)
        return t.data;
    float *x = cpu_scratch(slot, tensor_numel(t));
    tensor_load(x, t, 0, tensor_numel(t));
    return x;
}

float *tensor_result(Tensor t, int slot)
{
    return t.format.dtype == F32 ? t.data : cpu_scratch(slot, tensor_numel(t));
}

void transpose_codes(Tensor t)
{
    if (!t.data_t)
        return;
    const uint8_t *codes = t.data;
    uint8_t *transposed = t.data_t;
    for (int r = 0; r < t.rows; r++)
        for (int c = 0; c < t.cols; c++)
            transposed[(size_t)c * t.rows + r] = codes[(size_t)r * t.cols + c];
}

void tensor_finish(Tensor t, const float *values)
{
    if (format_is_fp8(t.format) && !t.format.group)
        *(float *)t.scale = scale_within_range(t, abs_max(values, tensor_numel(t)));
    if (values != t.data)
        tensor_store(t, 0, values, tensor_numel(t));
    transpose_codes(t);
}

void tensor_finish_scaled(Tensor t, const float *values)
{
    if (!format_is_fp8(t.format) || t.format.group) {
        tensor_finish(t, values);
        return;
    }
    if (!t.data)
        t.data = cpu_scratch(SLOTS - 1, tensor_numel(t) / sizeof(float) + 1);
    tensor_store(t, 0, values, tensor_numel(t));
    transpose_codes(t);
}

double *start_sum(Tensor t, const float *values, int slot)
{
    if (!values)
        return NULL;
    double *sum = (double *)cpu_scratch(slot, 2 * tensor_numel(t));
    for (size_t i = 0; i < tensor_numel(t); i++)
        sum[i] = t.empty ? 0 : values[i];
    return sum;
}

void finish_sum(Tensor t, float *values, const double *sum)
{
    if (!sum)
        return;
    for (size_t i = 0; i < tensor_numel(t); i++)
        values[i] = (float)sum[i];
    tensor_finish(t, values);
}
