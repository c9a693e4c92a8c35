/* Tensors in NF4 as bitsandbytes saves them. NAME has the packed codes. Other tensors, in any of
 * the files, are NAME.absmax, .quant_map and .quant_state.bitsandbytes__nf4, a JSON text; with
 * double quantization also .nested_absmax and .nested_quant_map. */
#pragma once
#include "kernels/nf4_map.h"
#include "model/checkpoint/safetensors.h"

/* Whether the tensor is stored in 4 bits, as nf4 or fp4. */
bool nf4_source_has(SafeFile *const *file, int count, const char *name);

/* Both functions read groups first .. first + groups - 1 of such a tensor (rows, cols) to host
 * memory. nf4_source_read reads tensors with double quantization, nf4_source_read_plain those
 * without. They die if the kind or the shape is wrong, or if the tensor is fp4, has other block
 * sizes than NF4_BLOCK and 256 or other maps, or is damaged; the message names file and tensor. */
void nf4_source_read(Nf4Group *to, SafeFile *const *file, int count, const char *name, size_t rows,
                     size_t cols, size_t first, size_t groups);
void nf4_source_read_plain(Nf4PlainGroup *to, SafeFile *const *file, int count, const char *name,
                           size_t rows, size_t cols, size_t first, size_t groups);
