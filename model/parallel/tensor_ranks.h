/* Tensor ranks: several ranks compute a block's linear layers together; each has a part of the
 * matrices [Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053; with sequence: Korthikanti et al.
 * 2022, arXiv 2205.05198]. In linear layers and attention, a rank has all tokens with a t-th part
 * of the heads and of the MLP's width. Norms and the residual stream have a t-th part of the
 * tokens, which are consecutive, with full width:
 *
 *     stream (N, C) -norm-> (N, C) -gather-> h (tN, C) -layers, attention-> sums (tN, C) -scatter-> stream (N, C)       t ranks
 *
 * Backward does the same with gradients. FP8 operands are gathered as codes. Their scale comes from
 * the maximum over all ranks, so it equals the scale that a single rank would compute. On one rank,
 * each function returns its input tensor, or does nothing. During generation, all tensor ranks have
 * the whole stream (row_parts is 1): no rows are gathered, and all ranks get the sums.
 *
 * Each tensor rank has a copy of norm weights and of the half of each adapter that is not cut.
 * The gradients of these copies are summed over RANKS_TENSOR and then over RANKS_REPLICA. NCCL may
 * add three or more replicas in another order on each tensor rank, so the copies may differ in the
 * last bits. Checkpoints contain the copy of the first tensor rank. */
#pragma once
#include "model/shape/buffers.h"

/* With tensor_ranks > 1, stream->config becomes a copy with this rank's numbers of heads and MLP
 * width. */
void tp_open(Stream *stream);
void tp_close(Stream *stream);
/* Frees the marks of exchanges. The memory plan calls it for marks of its Watch. */
void tp_unmark(Stream *stream);

/* The rows of t (tN, ...) that are this rank's tokens. */
Tensor own_rows(const Stream *stream, Tensor t);

/* The buffer for this rank's rows of an operand t (tN, C). Usually these rows of t are the buffer.
 * If t is FP8, the buffer is F32 (N, C), so that the codes are the same as on a single rank. */
Tensor rows_buffer(const Stream *stream, Tensor t);
/* t = the rows x (N, C) of all ranks, encoded. x may be rows_buffer of t. Call gather_rows_begin
 * and gather_rows_end only with several tensor ranks. Operations between the two calls overlap with
 * the exchange. They must not read or write t, nor change x. */
void gather_rows_begin(const Stream *stream, Tensor t, Tensor x);
void gather_rows_end(const Stream *stream, Tensor t);

/* Both functions recompute an operand t with its present scale, only with several tensor ranks.
 * gather_again starts to gather own_rows(stream, t). */
void gather_again(const Stream *stream, Tensor t);
/* Waits for the rows of gather_again, and computes the transpose of `wanted` if it has one. */
void complete_again(const Stream *stream, Tensor t, Tensor wanted);

/* The buffer into which a layer writes its partial sum of y. */
Tensor sums_buffer(const Stream *stream, Tensor y);
/* Returns this rank's rows of the sum over ranks. */
Tensor sum_rows(const Stream *stream, Tensor buffer);
/* sum_rows in two calls. Operations between the calls overlap with the sum. Only with several
 * tensor ranks. */
void sum_rows_begin(const Stream *stream, Tensor buffer);
Tensor sum_rows_end(const Stream *stream, Tensor buffer);
/* y = x + sum_rows(stream, buffer), where y may be x. Only with several tensor ranks. */
void add_rows(const Stream *stream, Tensor y, Tensor x, Tensor buffer);
