/* Tensors in NF4 as saved by bitsandbytes: NAME has the packed codes; also, in any of the files,
 * NAME.absmax, .quant_map and .quant_state.bitsandbytes__nf4, a JSON text; with double quantization
 * also .nested_absmax and .nested_quant_map. */
#pragma once
#include "kernels/nf4_map.h"
#include "model/checkpoint/safetensors.h"

/* Whether the tensor is stored in 4 bits, as nf4 or fp4. */
bool nf4_source_has(SafeFile *const *file, int count, const char *name);

/* Reads groups first .. first + groups - 1 of such a tensor (rows, cols) to host memory; plain: of
 * one without double quantization. Both die, naming file and tensor, if the kind or the shape is
 * wrong, if it is fp4, has other blocks than NF4_BLOCK and 256 or other maps, or is damaged. */
void nf4_source_read(Nf4Group *to, SafeFile *const *file, int count, const char *name, size_t rows,
                     size_t cols, size_t first, size_t groups);
void nf4_source_read_plain(Nf4PlainGroup *to, SafeFile *const *file, int count, const char *name,
                           size_t rows, size_t cols, size_t first, size_t groups);
