/* Tensors of any format, in host memory, as floats. The CPU back end uses this file. Checkpoints
 * and statistics use it too, with either back end. */
#pragma once
#include "kernels/tensor.h"

/* Elements first .. first + n - 1 in row-major order; they must be whole groups. tensor_store sets
 * the scales of groups, but keeps the scale of an FP8 tensor with group 0. */
void tensor_load(float *x, Tensor t, size_t first, size_t n);
void tensor_store(Tensor t, size_t first, const float *x, size_t n);
