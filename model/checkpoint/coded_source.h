/* Reads matrices that are stored as codes and scales, and decodes them to F32: the formats of
 * coded.h, and GPTQ in 4 bits. The names of a matrix's tensors, in any of the files, decide its
 * kind. Stored scales of activations are ignored: a run with FP8 operands computes its own scales.
 *
 *   N.weight F8_E4M3 (O,I), N.weight_scale or N.weight_scale_inv: one scale, one per row or one per block of 128 x 128
 *   N.weight I8 (O,I), N.weight_scale: as above; or N.SCB (O)
 *   N.weight_packed I32 (O, I/8), or (O, I/4) in 8 bits, N.weight_scale (O, I/group), N.weight_shape
 *   N.qweight I32 (I/8, O), N.scales (groups, O), N.qzeros, N.g_idx         [AutoGPTQ's format, version 1, symmetric]
 *   N.weight in NF4                                                         [nf4_source.h] */
#pragma once
#include "model/checkpoint/safetensors.h"

/* The file with the codes of the matrix NAME.weight; NULL: the matrix is not stored as codes. */
const SafeFile *coded_source_find(SafeFile *const *file, int count, const char *name);

/* The name NAME.weight of the matrix to which the tensor `name` belongs as codes or scales,
 * malloc'ed; NULL: the tensor belongs to no such matrix. */
char *coded_source_matrix(SafeFile *const *file, int count, const char *name);

/* A matrix as its own tensors describe it, without the model. bits: of packed codes; else 0.
 * by_inputs: the scales are (groups, outputs), as in GPTQ. */
typedef struct {
    Found scale, order;
    size_t rows, cols, bits;
    bool by_inputs;
} CodedShape;

/* Returns false if nothing is known, or if the folder's settings do not matter, as for NF4, whose
 * tensors contain their own settings. */
bool coded_source_shape(CodedShape *to, SafeFile *const *file, int count, const char *name);

/* Some tensors of a matrix (coded_source_matrix) exist only in pairs, such as codes and their
 * scales. Dies if `single` is one of such a pair and the other is missing; the message names the
 * missing tensor. */
void coded_source_refuse_single(SafeFile *const *file, int count, Found single);

/* Reads elements first .. first + n - 1 of the matrix (rows, cols). Dies on wrong shapes, types and
 * formats, naming file and tensor. */
void coded_source_read(float *to, SafeFile *const *file, int count, const char *name, size_t rows,
                       size_t cols, size_t first, size_t n);
