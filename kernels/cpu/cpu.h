/* Declarations that the files of the CPU back end share: conversion of formats, scratch memory,
 * checks.
 *
 * This back end is the specification. Every operation loads its inputs as F32, computes, and rounds
 * its outputs once. Sums that a user sees (norms, losses, gradients of norm weights) are in F64.
 * OpenBLAS computes the GEMMs. */
#pragma once
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/check_experts.h"
#include "kernels/fp8.h"
#include "kernels/kernels.h"
#include "kernels/values.h"

/* ---- tensors as floats; values.h has the same for parts of tensors --------------------------- */

/* returns the scale S of an FP8 tensor t with group 0 and max|t| = amax; updates t.scale_amax */
float scale_within_range(Tensor t, float amax);

void transpose_codes(Tensor t); /* fills data_t from data, unless data_t is NULL */

/* A whole tensor as floats. An F32 tensor's own memory is used; other formats use scratch memory of
 * the slot. */
enum { SLOTS = 12 };
float *tensor_values(Tensor t, int slot); /* values of t; NULL if t is absent */
float *tensor_result(Tensor t, int slot); /* memory for new values of t */
/* stores `values` in t, with scales and data_t */
void tensor_finish(Tensor t, const float *values);

/* As tensor_finish, but an FP8 tensor t with group 0 keeps its scale. If data or data_t is NULL,
 * that copy is not written. */
void tensor_finish_scaled(Tensor t, const float *values);

/* ---- column factors: see swiglu_forward in kernels.h; nothing is done if `channel` is NULL --- */

/* multiplies values by act.channel; unless the scale of act is reused, first chooses act.channel */
void channels_apply(Tensor act, float *values);
void channels_multiply(Tensor act, float *values); /* multiplies values by act.channel */

/* A vector of gradients that accumulates in F64. start_sum returns scratch memory of the slot with
 * the sum so far: `values`, or 0 if t is empty. start_sum returns NULL if `values` is NULL.
 * finish_sum stores the sum in t. */
double *start_sum(Tensor t, const float *values, int slot);
void finish_sum(Tensor t, float *values, const double *sum);

/* ---- linear layers and MLPs ------------------------------------------------------------------ */

/* Tensor t as GEMMs read it when they sum over its rows. Its column factors are divided out.
 * Element (r, c) is x[r * ld + c], or x[c * ld + r] if transposed. */
typedef struct {
    const float *x;
    bool transposed;
    int ld;
} Columns;
Columns tensor_columns(Tensor t, int slot); /* as tensor_values */

float sigmoid(float x);

/* ---- optimizers ------------------------------------------------------------------------------ */

/* w[at + i] = x[i] for i < n. If w is BF16, x[i] is rounded stochastically, with random bits that
 * depend on (seed, first + at + i). */
void store_weights(Tensor w, size_t at, const float *x, size_t n, uint64_t seed, uint64_t first);

/* ---- attention ------------------------------------------------------------------------------- */

/* Replaces the scores s of a row by probabilities over keys `begin` to `last`, and by 0 for other
 * keys. Returns lse. */
float attention_softmax(float *s, int begin, int last, int keys);

/* ---- scratch memory -------------------------------------------------------------------------- */

/* Returns memory for at least `floats` floats, with undefined contents. The memory of a slot only
 * grows. An operation uses each slot at most once. */
float *cpu_scratch(int slot, size_t floats);
