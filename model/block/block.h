/* Forward and backward of one transformer block. */
#pragma once
#include "model/shape/buffers.h"
#include "model/shape/units.h"

/* Computes the stream next->attn_res from a->attn_res. Saves in `a` the tensors that the recipe
 * keeps. */
void block_forward(const Stream *stream, const UnitTensors *w, const Acts *a, const Acts *next);

/* On entry stream->work.dres is dLoss/d(next->attn_res), on return, if step.needs_dx,
 * dLoss/d(a->attn_res); without it only the gradients of this block's weights are computed. They
 * are added to dw. Runs forward again as far as a->keep says. */
void block_backward(const Stream *stream, const UnitTensors *w, UnitTensors *dw, const Acts *a,
                    const Acts *next, BackwardStep step);
