/* Forward and backward of one transformer block. */
#pragma once
#include "model/shape/buffers.h"
#include "model/shape/units.h"

/* Computes the stream next->attn_res from a->attn_res. Saves in `a` the tensors that the recipe
 * keeps. */
void block_forward(const Stream *stream, const UnitTensors *w, const Acts *a, const Acts *next);

/* On entry stream->work.dres is dLoss/d(next->attn_res). Adds the gradients of this block's weights
 * to dw. If step.needs_dx, also sets stream->work.dres to dLoss/d(a->attn_res). Recomputes the
 * parts of forward that a->keep does not keep. */
void block_backward(const Stream *stream, const UnitTensors *w, UnitTensors *dw, const Acts *a,
                    const Acts *next, BackwardStep step);
