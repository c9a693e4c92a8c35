/* Tensors in host memory as floats, whatever their format: for the CPU back end, which computes with them, and for the telemetry,
 * which looks at what either back end stored. */
#pragma once
#include "kernels/tensor.h"

/* Elements first .. first + n - 1 in row-major order; whole groups. tensor_store sets the scales of groups, but uses the one
 * scale of an FP8 tensor of group 0 as it is. */
void tensor_load (float *x, Tensor t, size_t first, size_t n);
void tensor_store(Tensor t, size_t first, const float *x, size_t n);
