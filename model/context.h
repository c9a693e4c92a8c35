/* Context ranks: several ranks share the sequences of a micro-batch [Ulysses: Jacobs et al. 2023]. Outside attention each has
 * consecutive tokens of every sequence, a c-th part, with all heads; in attention it has whole sequences, with a c-th part of the
 * heads. So attention needs nobody's help, and windows and documents are those of whole sequences:
 *
 *     rot (N, S) -exchange-> qkv (cN, S/c) -attention-> mix (cN, HD/c) -exchange-> mix (N, HD)        N tokens of a rank, c ranks
 *
 * On one rank each function returns its tensor itself, or does nothing. */
#pragma once
#include "model/buffers.h"

/* x (N, ...), a tensor of attention, as whole sequences with this rank's heads, in `room`. */
Tensor context_heads (const Model *m, const Acts *a, Tensor room, Tensor x);

/* Where attention writes what becomes x; and the way from there to x. */
Tensor context_buffer  (const Model *m, Tensor room, Tensor x);
void   context_tokens(const Model *m, const Acts *a, Tensor x, Tensor room);

/* Attention of whole sequences, with this rank's heads. */
Attention context_attention(const Model *m, Attention a);

/* This rank's tokens (N) of (B, T) values of whole sequences on the host, in m->host_part or values itself. */
const int *context_part(const Model *m, const int *values);
