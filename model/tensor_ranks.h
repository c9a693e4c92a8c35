/* Tensor ranks: several ranks compute a block's linear layers together, each with a part of its matrices [Megatron-LM: Shoeybi et
 * al. 2019, arXiv 1909.08053; with sequence: Korthikanti et al. 2022, arXiv 2205.05198]. In layers and attention a rank has all tokens
 * and a t-th part of the heads and of the MLP's width; between them it has consecutive tokens, a t-th part, of full width:
 *
 *     stream (N, C) -norm-> (N, C) -gather-> h (tN, C) -layers, attention-> partial sums (tN, C) -scatter-> stream (N, C)     t ranks
 *
 * Backward does the same with gradients. FP8 operands are encoded after the gather, by each rank with one scale for all tokens, so
 * that codes are those of one rank. On one rank each function returns its tensor itself, or does nothing. */
#pragma once
#include "model/buffers.h"

/* The config of this rank's part of each block: its heads and its MLP's width. The caller frees it. */
ModelConfig *tensor_config(const ModelConfig *c, int ranks);

/* The rows of this rank's tokens in t (tN, ...). */
Tensor own_rows    (const Model *m, Tensor t);

/* Where the rows are written that become the operand t (tN, C), in the stream's format: t itself unless it is FP8. */
Tensor rows_buffer (const Model *m, Tensor t);
/* The rows of all ranks' x (N, C), in buffer (tN, C). */
Tensor gather_rows (const Model *m, Tensor buffer, Tensor x);
/* buffer has this rank's rows: gathers those of the others, and encodes t from them. _codes: with the scale that t has. */
void   encode_rows (const Model *m, Tensor t, Tensor buffer);
void   encode_rows_codes(const Model *m, Tensor t, Tensor buffer);

/* Where a layer writes its partial sum of what becomes y; and the sum over ranks, this rank's rows. */
Tensor sums_buffer (const Model *m, Tensor y);
Tensor sum_rows    (const Model *m, Tensor buffer);
