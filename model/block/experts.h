/* The MLP of a block with experts. A router sends each token to the k experts with the largest
 * probabilities p. The token's output is the sum of the outputs of these experts, times weights:
 *
 *     h = Norm(r1)      p = softmax(Wrouter h)
 *     r2 = r1 + sum over the token's experts e of Wdown_e (weight_e SwiGLU_e(h))
 *
 * The weights are p of these experts, perhaps divided by their sum. With bias_gamma, the chosen
 * experts are those with the largest p + bias. */
#pragma once
#include "model/block/branch.h"

/* Forward of the MLP. */
void experts_forward(const Block *b);
/* Backward of the MLP; first recomputes what forward has not saved. On entry work->dres is
 * dLoss/d(r2); it becomes dLoss/d(r1). */
void experts_backward(const Block *b);

/* Sets the bias (L, E) of all routers; NULL: zeros. Has no effect without bias_gamma. */
void experts_set_bias(Stream *s, const float *bias);
/* Sets the factors of the router's losses for a step of `sequences` sequences over all ranks. */
void experts_begin_step(Stream *s, int sequences);
