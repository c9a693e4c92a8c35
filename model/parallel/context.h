/* Context parallelism: c ranks share the sequences of a micro-batch [Ulysses: Jacobs et al. 2023].
 * Outside attention, each rank has a c-th part of the tokens of every sequence, with all heads. In
 * attention, each rank has all tokens, with a c-th part of the heads. So attention kernels, windows
 * and documents always see whole sequences:
 *
 *     qkv_rotated (N, S) -exchange-> (cN, S/c) -attention-> (cN, HD/c) -exchange-> attn_out (N, HD)     N tokens each, c ranks
 *
 * With fewer key heads than ranks, several consecutive ranks get a copy of the same head; the
 * exchange of gradients adds the gradients of these copies. A document that lies entirely on one
 * rank may skip the exchange (context_work.h): that rank computes the document's attention with all
 * heads.
 *
 * On one rank, each function returns its input tensor, or does nothing. */
#pragma once
#include "model/shape/buffers.h"

/* Whether documents of this model may skip the exchange. */
bool context_skips(const Stream *stream);
/* Whether attention runs on whole sequences: on one rank, or on several after an exchange. */
bool context_attends_whole(const Stream *stream);

/* Allocate and free stream->exchange. */
void context_allocate(Stream *stream);
void context_free(Stream *stream);
/* Decides for stream->docs which documents are exchanged. Sets stream->exchange and
 * stream->own_docs. */
void context_divide(Stream *stream);
/* As context_divide, but assumes the worst case for memory: all documents are exchanged and also
 * attended on this rank. */
void context_divide_for_plan(Stream *stream);

/* Exchanges x (N, ...), a tensor of attention: `buffer` gets whole sequences with this rank's
 * heads. Rows of `buffer` of documents that are not exchanged are undefined. */
Tensor context_heads(const Stream *stream, const Acts *a, Tensor buffer, Tensor x);

/* The buffer into which attention writes the tensor that becomes x. */
Tensor context_buffer(const Stream *stream, Tensor buffer, Tensor x);
/* Exchanges `buffer` back to x. Rows of x that are not exchanged do not change. */
void context_tokens(const Stream *stream, const Acts *a, Tensor x, Tensor buffer);

/* Runs attention on whole sequences with this rank's heads. */
Attention context_attention(const Stream *stream, Attention a);

/* Selects this rank's N of the (B, T) `values` on the host: the context rank's part of each
 * sequence, and from this part the tensor rank's part. Returns a pointer into `values` or to
 * stream->host_part. */
const int *context_part(const Stream *stream, const int *values);
