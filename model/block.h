/* Forward and backward of one transformer block. */
#pragma once
#include "model/buffers.h"

void block_forward (const Model *m, const Unit *w, Acts *a, Acts *next);

/* In backward, where a->keep says so: forward up to what backward reads. */
void block_recompute(const Model *m, const Unit *w, Acts *a, Acts *next);
void block_backward(const Model *m, const Unit *w, Unit *dw, const Acts *a, bool needs_dx);
void norm_to_stream_backward(const Model *m, Tensor dnorm, Tensor x, const float *stats, Tensor norm, bool accumulate);
