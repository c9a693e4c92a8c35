/* Shared by the files of the CPU back end: conversion of formats, scratch memory, checks.
 *
 * This back end is the specification: every operation loads its inputs as F32, computes, and rounds
 * its outputs once. Sums that a user sees (norms, losses, gradients of norm weights) are in double;
 * GEMMs are OpenBLAS's. */
#pragma once
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/fp8.h"
#include "kernels/kernels.h"
#include "kernels/values.h"

/* ---- tensors as floats; parts of them: values.h ---------------------------------------------- */

/* returns the scale S of an FP8 tensor t with group 0 and max|t| = amax; updates t's scale_amax */
float scale_within_range(Tensor t, float amax);

void transpose_codes(Tensor t); /* fills data_t from data, unless data_t is NULL */

/* A whole tensor as floats: an F32 tensor's own memory, else scratch memory of the slot. */
enum { SLOTS = 12 };
float *tensor_values(Tensor t, int slot); /* its values; NULL for no tensor */
float *tensor_result(Tensor t, int slot); /* memory for new values */
/* stores them in t, with scales and data_t */
void tensor_finish(Tensor t, const float *values);

/* The same, but an FP8 tensor t with group 0 keeps its scale. If its data or data_t is NULL, that
 * copy is not written. */
void tensor_finish_scaled(Tensor t, const float *values);

/* ---- factors of columns: swiglu_forward in kernels.h; without `channel` they do nothing ------ */

/* multiplies values by act.channel, which it chooses first unless the scale of act is reused */
void channels_apply(Tensor act, float *values);
void channels_multiply(Tensor act, float *values); /* multiplies values by act.channel */

/* A vector of gradients that accumulates in double. start_sum: the sum so far, `values` or 0 if t
 * is empty, in scratch memory of the slot; NULL without values. finish_sum: stores it in t. */
double *start_sum(Tensor t, const float *values, int slot);
void finish_sum(Tensor t, float *values, const double *sum);

/* ---- optimizers ------------------------------------------------------------------------------ */

/* w[at + i] = x[i] for i < n; a BF16 w is rounded stochastically, by (seed, first + at + i). */
void store_weights(Tensor w, size_t at, const float *x, size_t n, uint64_t seed, uint64_t first);

/* ---- attention ------------------------------------------------------------------------------- */

/* Replaces the scores s of a row by probabilities over keys `begin` to `last`, 0 for other keys.
 * Returns lse. */
float attention_softmax(float *s, int begin, int last, int keys);

/* ---- scratch memory -------------------------------------------------------------------------- */

/* At least `floats` floats, undefined; the memory of a slot only grows. An operation uses a slot
 * once. */
float *cpu_scratch(int slot, size_t floats);
