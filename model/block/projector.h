/* Images: a vision tower computes rows of features before the training; a projector maps these rows
 * to the width of the stream. The mapped rows replace the embedding's rows at the tokens
 * `image.token_id` [LLaVA: Liu et al. 2023, arXiv 2304.08485, sec. 4.1].
 *
 *     forward    h = x W1^T + b1, y = gelu(h) W2^T + b2 (linear: y = h); stream[at[i]] = y[i]
 *     backward   dy[i] = dres[at[i]], dres[at[i]] = 0, then the gradients of W2, b2, h, W1, b1; not of x
 *
 * As in COAT, the unit computes in the stream's format in every recipe. The image token's row of
 * the embedding gets no gradient. x has R rows: the rows of the micro-batch's images, then padding
 * to a multiple of 256, but at most N. Padding rows have at = -1 and are 0, and so are their
 * gradients. So a micro-batch without images is no special case. */
#pragma once
#include "model/shape/buffers.h"

/* Places the buffers that unit u shares with other units. */
void projector_plan(Model *m, int u);
void projector_forward(Model *m, const UnitTensors *w, int u);
void projector_backward(Model *m, const UnitTensors *w, UnitTensors *dw);

/* Places x and at, and allocates their host memory at the first call. Without images it does
 * nothing. */
void projector_plan_rows(Arena *arena, Model *m);
void projector_free(Model *m); /* frees this host memory */

/* Copies the features of a micro-batch to the device. rows (B, T), for whole sequences: a pointer
 * to the features of each token, in images.dtype; NULL if the token is no image token. Waits for
 * the device. */
void projector_put(Model *m, const void *const *rows);
