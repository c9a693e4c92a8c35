/* Tensors of all experts of a block, as transformers 5 writes them with
 * save_original_format=False. */
#pragma once
#include "model/checkpoint/safetensors.h"

/* In the list of f's tensors, replaces each such tensor by one tensor per expert and matrix:
 *     experts.gate_up_proj (E, 2F, C)   experts.<e>.gate_proj.weight (F, C), then up_proj
 *     experts.down_proj (E, C, F)       experts.<e>.down_proj.weight (C, F)
 * [transformers 5, conversion_mapping.py]. So all other code reads one form only. */
void stacked_split(SafeFile *f);
