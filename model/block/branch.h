/* A branch of a block: a norm, a first linear layer, a middle (attention or SwiGLU), a last linear
 * layer.
 *
 *     pre-norm (Llama, OLMo-1)         out = res + Last(Middle(First(Norm(res))))
 *     norm_after (OLMo-2)              out = res + Norm(Last(Middle(First(res))))
 *
 * These functions compute both ends of a branch: the norm, the first and the last layer, and the
 * exchanges of tensor ranks (tensor_ranks.h). The caller computes the middle, on the rows of all
 * tensor ranks. */
#pragma once
#include "model/block/linear.h"

typedef struct {
    LinearLayer first, last;
    Tensor res, out;   /* (N, C) the residual stream before and after the branch */
    Tensor h;          /* operand of the first layer */
    Tensor x;          /* the norm's input, as saved for backward */
    float *stats;      /* mean and rstd of the norm's input */
    Tensor output;     /* output of the last layer if the norm follows it (norm_after) */
    Tensor norm;       /* the norm's weights */
    Tensor dnorm;      /* gradient of the norm's weights */
    const float *amax; /* max|dLoss/d(out)|; NULL: not known */
    /* true: branch_foresee gathers dLoss/d(out) over tensor ranks before the branch's backward
     * begins */
    bool foresees;
} Branch;

Branch branch_attention(const Block *b);
Branch branch_mlp(const Block *b);

/* In forward: computes and returns the operand of the first layer from the stream. The caller
 * multiplies it by the first layer. */
Tensor branch_enter(const Block *b, const Branch *s);
/* In forward: multiplies y, the operand of the last layer, by that layer, and adds the result to
 * the stream. */
void branch_leave(const Block *b, const Branch *s, Tensor y);
/* In backward: recomputes those results of branch_leave that the backward of a norm or an adapter
 * reads. */
void branch_leave_again(const Block *b, const Branch *s, Tensor y);

/* Backward, in this order. On entry work->dres is dLoss/d(out).
 *   foresee         call when dLoss/d(out) is complete. Starts its gather over tensor ranks.
 *                   Until leave_backward nothing may change work->dy or work->dres
 *   leave_backward  returns dLoss/d(output of the last layer), in work->dy
 *   last_dw         call after linear_dx of the last layer: computes the last layer's weight
 *                   gradients, or leaves them to enter_backward if an exchange there can overlap
 *                   them
 *   enter_backward  computes the weight gradients of the first layer. If wants_dx, work->dres
 *                   becomes dLoss/d(res). Recomputes the first layer's input from the saved norm
 *                   input, as far as the recipe did not save it. dy: the gradient of the first
 *                   layer's output; last: as in last_dw; next: the branch whose backward comes
 *                   next; NULL: that branch is in another unit */
void branch_foresee(const Block *b, const Branch *s);
Tensor branch_leave_backward(const Block *b, const Branch *s);
void branch_last_dw(const Block *b, LinearGrad last);
void branch_enter_backward(const Block *b, const Branch *s, Tensor dy, LinearGrad last,
                           bool wants_dx, const Branch *next);

/* dres = [dres +] the gradient of the norm's input x. The gradient of the norm's output is
 * work->dh. */
void branch_norm_backward(const Stream *stream, const BackwardScratch *work, Tensor dnorm, Tensor x,
                          const float *stats, Tensor norm, bool accumulate);
