/* Forward and backward of one transformer block. */
#pragma once
#include "model/shape/buffers.h"

void block_forward(const Model *m, const UnitTensors *w, Acts *a, Acts *next);

/* Runs forward again as far as a->keep says. next: as in forward. */
void block_backward(const Model *m, const UnitTensors *w, UnitTensors *dw, const Acts *a,
                    const Acts *next, bool needs_dx, bool goes_on);
void norm_to_stream_backward(const Model *m, Tensor dnorm, Tensor x, const float *stats,
                             Tensor norm, bool accumulate);
