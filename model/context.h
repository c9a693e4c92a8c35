/* Context ranks: several ranks share the sequences of a micro-batch [Ulysses: Jacobs et al. 2023]. Outside attention each has
 * consecutive tokens of every sequence, a c-th part, with all heads; in attention it has whole sequences, with a c-th part of the
 * heads. So the attention kernels do not change, and windows and documents are those of whole sequences:
 *
 *     qkv_rotated (N, S) -exchange-> (cN, S/c) -attention-> (cN, HD/c) -exchange-> attn_out (N, HD)     N tokens each, c ranks
 *
 * With fewer key heads than ranks several consecutive ranks get the same one; their gradients of it are added on the way back.
 *
 * On one rank each function returns its tensor itself, or does nothing. */
#pragma once
#include "model/buffers.h"

/* x (N, ...), a tensor of attention, as whole sequences with this rank's heads, in `buffer`. */
Tensor context_heads (const Model *m, const Acts *a, Tensor buffer, Tensor x);

/* Where attention writes what becomes x; and the way from there to x. */
Tensor context_buffer(const Model *m, Tensor buffer, Tensor x);
void   context_tokens(const Model *m, const Acts *a, Tensor x, Tensor buffer);

/* Attention of whole sequences, with this rank's heads. */
Attention context_attention(const Model *m, Attention a);

/* This rank's tokens (N) of (B, T) values of whole sequences on the host, in m->host_part or values itself: of those of its context
 * rank, in their order, a part for each tensor rank. */
const int *context_part(const Model *m, const int *values);
