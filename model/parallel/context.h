/* Context ranks: several ranks share the sequences of a micro-batch [Ulysses: Jacobs et al. 2023].
 * Outside attention each has consecutive tokens of every sequence, a c-th part, with all heads; in
 * attention it has whole sequences, with a c-th part of the heads. So the attention kernels do not
 * change, and windows and documents are those of whole sequences:
 *
 *     qkv_rotated (N, S) -exchange-> (cN, S/c) -attention-> (cN, HD/c) -exchange-> attn_out (N, HD)     N tokens each, c ranks
 *
 * With fewer key heads than ranks several consecutive ranks get the same one; their gradients of it
 * are added on the way back. Documents that lie in one rank's part may stay there (context_work.h):
 * that rank computes their attention, with all heads.
 *
 * On one rank each function returns its tensor itself, or does nothing. */
#pragma once
#include "model/shape/buffers.h"

/* Whether documents of this model may be left out of the exchange. */
bool context_skips(const Stream *stream);
/* Whether whole sequences are attended, on one rank or of several. */
bool context_attends_whole(const Stream *stream);

/* stream->exchange; context_divide sets it and stream->own_docs for stream->docs. context_divide_for_plan: as if
 * all documents were exchanged and were this rank's own. */
void context_allocate(Stream *stream);
void context_free(Stream *stream);
void context_divide(Stream *stream);
void context_divide_for_plan(Stream *stream);

/* x (N, ...), a tensor of attention, as whole sequences with this rank's heads, in `buffer`. Rows
 * that are not exchanged have no meaning there. */
Tensor context_heads(const Stream *stream, const Acts *a, Tensor buffer, Tensor x);

/* Where attention writes what becomes x; and the way from there to x, of which other rows stay as
 * they are. */
Tensor context_buffer(const Stream *stream, Tensor buffer, Tensor x);
void context_tokens(const Stream *stream, const Acts *a, Tensor x, Tensor buffer);

/* Attention of whole sequences, with this rank's heads. */
Attention context_attention(const Stream *stream, Attention a);

/* This rank's N of the (B, T) `values` on the host: its context part of each sequence, in order,
 * and of these its tensor rank's N. They lie in stream->host_part, or in `values` itself. */
const int *context_part(const Stream *stream, const int *values);
