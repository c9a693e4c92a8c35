/* What the files of the CPU back end share: conversion of formats, scratch memory, checks.
 *
 * This back end is the specification: every operation loads its inputs as F32, computes, and rounds its outputs once.
 * Sums that a user sees (norms, losses, gradients of norm weights) add up in double; GEMMs are OpenBLAS's. */
#pragma once
#include "kernels/check.h"
#include "kernels/kernels.h"

/* ---- numbers ---------------------------------------------------------------------------------------------- */

float    bf16_decode(uint16_t code);
uint16_t bf16_encode(float x);                  /* to nearest, ties to even; NaN: 0x7fff */
float    fp8_decode (uint8_t code, DType d);
uint8_t  fp8_encode (float x, DType d);         /* to nearest, ties to even; saturates, also infinities; NaN: 0x7f */
float    fp8_max    (DType d);                  /* largest finite value: 448 or 57344 */
float    fp8_scale  (float amax, DType d);      /* S of a whole tensor, F32 */
uint16_t fp8_group_scale(float amax, DType d);  /* S of a group, BF16 rounded up */
float    abs_max    (const float *x, size_t n); /* NaN counts as 0 */

/* ---- tensors as floats -------------------------------------------------------------------------------------- */

/* Elements first .. first + n - 1 in row-major order; whole groups. `store` sets group scales, but uses the one scale
 * of a group-0 FP8 tensor as it is: tensor_finish sets that. */
void load (float *x, Tensor t, size_t first, size_t n);
void store(Tensor t, size_t first, const float *x, size_t n);
void transpose_codes(Tensor t);                 /* data_t from data; nothing if there is no data_t */

/* A whole tensor as floats: the memory itself of an F32 tensor, else scratch memory of the slot. */
enum { SLOTS = 12 };
float *tensor_values(Tensor t, int slot);       /* its values; NULL for no tensor */
float *tensor_result(Tensor t, int slot);       /* room for new values */
void   tensor_finish(Tensor t, const float *values);        /* rounds them into t, with scales and data_t */

/* The same with the scale that an FP8 t of group 0 has; its data or data_t may be NULL: not written. */
void   tensor_finish_again(Tensor t, const float *values);

/* ---- scratch memory ---------------------------------------------------------------------------------------- */

/* At least `floats` floats, undefined; a slot keeps its memory and only grows. One operation, one use of a slot. */
float *scratch(int slot, size_t floats);

