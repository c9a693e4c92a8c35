/* Images: rows of features, computed before the training by a vision tower, which a projector maps
 * to the width of the stream. They take the places of the embedding's rows at the tokens
 * `image.token_id` [LLaVA: Liu et al. 2023, arXiv 2304.08485, sec. 4.1].
 *
 *     forward    h = x W1^T + b1, y = gelu(h) W2^T + b2 (linear: y = h); stream[at[i]] = y[i]
 *     backward   dy[i] = dres[at[i]], dres[at[i]] = 0, then the gradients of W2, b2, h, W1, b1; x has none
 *
 * The unit computes in the stream's format in every recipe, as COAT does. The embedding's row of
 * the token gets no gradient from these places. x has R rows: those of the images of a
 * micro-batch, padded to a multiple of 256, but at most N, by rows with at = -1, which are 0 and
 * whose gradients are 0. So a micro-batch without images is no special case. */
#pragma once
#include "model/shape/buffers.h"

/* projector_plan: places the buffers that unit u shares with other units. */
void projector_plan(Model *m, int u);
void projector_forward(Model *m, const UnitTensors *w, int u);
void projector_backward(Model *m, const UnitTensors *w, UnitTensors *dw);

/* Places x and at, and makes their host memory at the first call; nothing in a model of text only.
 * projector_free: that memory. */
void projector_plan_rows(Arena *arena, Model *m);
void projector_free(Model *m);

/* Copies the features of a micro-batch to the device. rows (B, T), for whole sequences: a pointer
 * to the features of each token, in images.dtype; NULL if the token is not of an image. Waits for
 * the device. */
void projector_put(Model *m, const void *const *rows);
