/* Adapters of all experts of a block, as PEFT stores them with transformers 5. */
#pragma once
#include "model/checkpoint/safetensors.h"

/* Removes such tensors from f, a file of adapters of rank r. Returns a file in memory with the same
 * numbers, under the names of single experts; NULL: f has no such tensors. With E experts:
 *     experts.base_layer.lora_A (R E, C)   experts.<e>.gate_proj.lora_A (r, C), and up_proj
 *     experts.base_layer.lora_B (2F, R E)  experts.<e>.gate_proj.lora_B (F, r), and up_proj
 *     experts.lora_A (r E, F)              experts.<e>.down_proj.lora_A (r, F)
 *     experts.lora_B (C, r E)              experts.<e>.down_proj.lora_B (C, r)
 * Rows of A belong to expert row / R, columns of B to expert column % E [PEFT 0.21, ParamWrapper].
 * fused: PEFT has joined adapters of gate and of up, R = 2r; dies if B has other numbers than 0
 * outside its two blocks. Otherwise gate and up share A, R = r. */
SafeFile *stacked_adapters(SafeFile *f, int r, bool fused);
