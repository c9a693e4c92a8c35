/* Called by the dense operations if a tensor is FP8: norm_fp8.cu, swiglu_fp8.cu, rope_fp8.cu.
 * Arguments as in kernels.h. */
#pragma once
#include "kernels/cuda/cuda.h"

void norm_forward_fp8(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                      Norm norm, bool exact);
void norm_recompute_fp8(Tensor y, Tensor x, const float *stats, Tensor w);

void swiglu_forward_fp8(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product, bool exact);
void swiglu_backward_fp8(Tensor dgate_up, Tensor act, Tensor dact, Tensor gate_up);

void rope_forward_fp8(Tensor y, Tensor x, Attention a); /* neither clip nor norm */
void rope_backward_fp8(Tensor dx, Tensor dy, Attention a);
