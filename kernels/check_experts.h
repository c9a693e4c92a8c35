/* Checks of the arguments of experts.h's operations, which both back ends make. */
#pragma once
#include "kernels/experts.h"

/* Each function checks the arguments of one operation. The checks of GEMMs return true if the
 * operands are FP8. */
void check_route(Routing r, Tensor logits);
void check_router_stats(Tensor stats, Tensor logits, Routing r);
void check_router_sum(Tensor sums, Tensor stats, int experts);
void check_route_backward(Tensor dlogits, const float *dweight, Tensor logits, Routing r,
                          Tensor counts, float balance);
void check_experts_gather(Tensor y, Tensor x, Routing r);
void check_experts_gather_again(Tensor y, Tensor x, Routing r);
void check_experts_sum(Tensor y, Tensor x, Tensor add, Routing r);
bool check_experts_matmul(Tensor y, Tensor x, Tensor w, Routing r);
bool check_experts_matmul_dx(Tensor dx, Tensor dy, Tensor w, Routing r);
bool check_experts_matmul_dw(Tensor dw, Tensor dy, Tensor x, Routing r);
/* The checks of adapters return the rank r of a part. */
int check_experts_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, Routing r);
int check_experts_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Routing r);
int check_experts_lora_dw(LoraMatrix dm, Tensor xa, Tensor x, Routing r);
void check_experts_swiglu(Tensor act, Tensor gate_up, Tensor wide, Routing r);
void check_experts_swiglu_backward(Tensor dgate_up, Tensor act, const float *dweight, Tensor dact,
                                   Tensor gate_up, Routing r);
