/* The region QUANTIZED of a unit: frozen matrices of blocks under adapters, stored in E4M3 or NF4.
 * The matrices are gathered in the stored format, and converted to GEMM operands for each use
 * (table `ways` of param_store.c).
 *
 *   E4M3  is stored with the codes and scale of an FP8 operand. Forward reads it directly, backward
 *         a transposed copy. If operands are E5M2, each pass rounds the values again with the same
 *         scale; all values are in E5M2's range.
 *   NF4   is stored tensor by tensor in whole groups (nf4_map.h). If GEMMs are in FP8, one pass
 *         makes codes and another one transposed codes, with the scale of the matrix's amax.
 *
 * Recipes without FP8 operands convert E4M3 and NF4 to the stream's format. The operands of two
 * blocks exist at a time (of one block on a single rank without offload.frozen), and the operands
 * of units that stay gathered (fsdp.h).
 *
 * Each tensor rank encodes or reads the whole matrix and keeps its part, so the codes are the same
 * as on a single rank. In NF4, a rank keeps whole blocks, each with its absmax in F32, decoded from
 * double quantization. Ranks cannot keep the second scale, because the blocks of a group may be on
 * several ranks. */
#pragma once
#include "model/store/param_store.h"

/* Stores this rank's part of a matrix. whole: the whole matrix, (rows, cols) in F32 or BF16, in
 * device memory, the same on all ranks. */
void quantized_store(ParamStore *store, int unit, const Param *p, Tensor whole);

/* Rounds frozen F32 weights, except adapters, to values of BF16. */
void frozen_round(ParamStore *store);

/* As quantized_store, for a whole matrix that is already in NF4. groups: param_nf4_groups groups in
 * host memory; their type is Nf4PlainGroup if there is no double quantization. */
void quantized_store_nf4(ParamStore *store, int unit, const Param *p, const void *groups);
