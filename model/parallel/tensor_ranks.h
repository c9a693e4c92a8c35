/* Tensor ranks: several ranks compute a block's linear layers together, each with a part of its
 * matrices [Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053; with sequence: Korthikanti et al.
 * 2022, arXiv 2205.05198]. In layers and attention a rank has all tokens and a t-th part of the
 * heads and of the MLP's width; between them it has consecutive tokens, a t-th part, of full width:
 *
 *     stream (N, C) -norm-> (N, C) -gather-> h (tN, C) -layers, attention-> sums (tN, C) -scatter-> stream (N, C)       t ranks
 *
 * Backward does the same with gradients. FP8 operands are gathered as codes: their scale is that of
 * all ranks' tokens, as on one rank, from the maximum of all. On one rank each function returns its
 * tensor itself, or does nothing. While generating, all tensor ranks have the whole stream
 * (row_parts is 1): nothing is gathered, and sums are added on all of them.
 *
 * Each tensor rank has a copy of norms and of halves of adapters. It sums their gradients over
 * RANKS_TENSOR and then over RANKS_REPLICA, where NCCL may add three or more replicas in another
 * order for each tensor rank: copies may then differ in the last bits. Files have those of the
 * first. */
#pragma once
#include "model/shape/buffers.h"

/* open: with tensor_ranks > 1, stream->config becomes that of this rank's part of each block: its heads
 * and its MLP's width. unmark: frees the marks of exchanges, as the watch of a plan must. */
void tensor_open(Stream *stream);
void tensor_close(Stream *stream);
void tensor_unmark(Stream *stream);

/* The rows of this rank's tokens in t (tN, ...). */
Tensor own_rows(const Stream *stream, Tensor t);

/* Where this rank's rows of an operand t (tN, C) are written: t's own, or if it is FP8 (N, C) in
 * F32, from which it gets the codes that it has on one rank. */
Tensor rows_buffer(const Stream *stream, Tensor t);
/* t = the rows x (N, C) of all ranks, encoded; x may be its rows_buffer. Not for one rank. Between
 * begin and end other operations overlap the exchange; they may not touch t, nor change x. */
void gather_rows_begin(const Stream *stream, Tensor t, Tensor x);
void gather_rows_end(const Stream *stream, Tensor t);

/* To recompute an operand t with the scale that it has, not for one rank: gather_again begins to
 * gather own_rows(stream, t), complete_again ends that and makes the transpose of `wanted` if that has
 * one. */
void gather_again(const Stream *stream, Tensor t);
void complete_again(const Stream *stream, Tensor t, Tensor wanted);

/* Where a layer writes its partial sum of what becomes y; and the sum over ranks, this rank's rows.
 * add_rows, not for one rank: y = that sum + x, where y may be x. begin and end, not for one rank:
 * sum_rows that other operations overlap. */
Tensor sums_buffer(const Stream *stream, Tensor y);
Tensor sum_rows(const Stream *stream, Tensor buffer);
void sum_rows_begin(const Stream *stream, Tensor buffer);
Tensor sum_rows_end(const Stream *stream, Tensor buffer);
void add_rows(const Stream *stream, Tensor y, Tensor x, Tensor buffer);
