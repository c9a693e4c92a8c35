/* Variants for FP8 tensors, called by the operations in norm.cu, swiglu.cu and rope.cu. The
 * variants are in norm_fp8.cu, swiglu_fp8.cu and rope_fp8.cu. Arguments are as in kernels.h. */
#pragma once
#include "kernels/cuda/cuda.h"

void norm_forward_fp8(Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual,
                      Norm norm, bool exact);
void norm_recompute_fp8(Tensor y, Tensor x, const float *stats, Tensor w);

void swiglu_forward_fp8(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product, bool exact);
void swiglu_backward_fp8(Tensor dgate_up, Tensor act, Tensor dact, Tensor gate_up);

void rope_forward_fp8(Tensor y, Tensor x, Attention a); /* without clip and norm */
void rope_backward_fp8(Tensor dx, Tensor dy, Attention a);
