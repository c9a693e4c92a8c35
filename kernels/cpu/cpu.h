/* What the files of the CPU back end share: conversion of formats, scratch memory, checks.
 *
 * This back end is the specification: every operation loads its inputs as F32, computes, and rounds its outputs once.
 * Sums that a user sees (norms, losses, gradients of norm weights) add up in double; GEMMs are OpenBLAS's. */
#pragma once
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/fp8.h"
#include "kernels/kernels.h"
#include "kernels/values.h"

/* ---- tensors as floats; parts of them: values.h --------------------------------------------------------- */

float scale_within_range(Tensor t, float amax);      /* S of an FP8 t of group 0 with max|t| = amax; t's range follows */

void transpose_codes(Tensor t);                 /* data_t from data; nothing if there is no data_t */

/* A whole tensor as floats: the memory itself of an F32 tensor, else scratch memory of the slot. */
enum { SLOTS = 12 };
float *tensor_values(Tensor t, int slot);       /* its values; NULL for no tensor */
float *tensor_result(Tensor t, int slot);       /* room for new values */
void   tensor_finish(Tensor t, const float *values);        /* rounds them into t, with scales and data_t */

/* The same with the scale that an FP8 t of group 0 has; its data or data_t may be NULL: not written. */
void   tensor_finish_again(Tensor t, const float *values);

/* A gradient (1, width) that adds up in double: the sum so far, of values or 0 if t is empty, in scratch memory of the slot, NULL
 * for no values; and back. */
double *start_sum (Tensor t, const float *values, int slot);
void    finish_sum(Tensor t, float *values, const double *sum);

/* ---- attention ---------------------------------------------------------------------------------------------- */

/* The scores s of a row become probabilities: those of keys `begin` to `last`, 0 for the other keys. Returns lse. */
float attention_softmax(float *s, int begin, int last, int keys);

/* ---- scratch memory ---------------------------------------------------------------------------------------- */

/* At least `floats` floats, undefined; a slot keeps its memory and only grows. One operation, one use of a slot. */
float *cpu_scratch(int slot, size_t floats);
