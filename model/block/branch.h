/* A branch of a block: a norm, a first linear layer, what lies between, a last linear layer.
 *
 *     pre-norm (Llama, OLMo-1)         out = res + Last(Middle(First(Norm(res))))
 *     norm_after (OLMo-2)              out = res + Norm(Last(Middle(First(res))))
 *
 * These functions are both ends of it, where the branch meets the residual stream: the norm, and
 * with tensor ranks the exchanges, since between its ends a branch has the rows of all tensor ranks
 * (tensor_ranks.h). What lies between is the caller's. */
#pragma once
#include "model/block/linear.h"

typedef struct {
    LinearLayer first, last;
    Tensor res, out;   /* (N, C) the stream before and after it */
    Tensor h;          /* the first layer's operand */
    Tensor x;          /* the norm's input as its backward reads it, and ... */
    float *stats;      /* ... its mean and rstd */
    Tensor output;     /* norm_after: what the last layer writes */
    Tensor norm;       /* the norm's weights, and ... */
    Tensor dnorm;      /* ... their gradient */
    const float *amax; /* max|dLoss/d(out)|; NULL: not known */
    /* Tensor ranks begin to gather dLoss/d(out) as soon as it is complete, before the branch is at
     * work: branch_foresee. */
    bool foresees;
} Branch;

Branch branch_attention(const Block *b);
Branch branch_mlp(const Block *b);

/* Forward. enter: the operand of the first layer from the stream, which is returned as that layer
 * multiplies it. leave: y is the last layer's operand. */
Tensor branch_enter(const Block *b, const Branch *s);
void branch_leave(const Block *b, const Branch *s, Tensor y);
/* leave once more, in backward: only what a norm's or an adapter's backward reads. */
void branch_leave_again(const Block *b, const Branch *s, Tensor y);

/* Backward, in this order. On entry work->dres is dLoss/d(out).
 *   foresee         where dLoss/d(out) is complete: tensor ranks may begin to gather it. Until
 *                   leave_backward nothing may change work->dy or work->dres
 *   leave_backward  returns dLoss/d(output of the last layer), in work->dy
 *   last_dw         after the last layer's linear_dx: its gradients, unless an exchange of
 *                   enter_backward is to overlap them
 *   enter_backward  dy: the gradient of the first layer's output; last: as in last_dw. The first
 *                   layer's gradients, and if wants_dx work->dres becomes dLoss/d(res). What the
 *                   recipe does not keep of the first layer's input is recomputed from the saved
 *                   norm input. next: the branch that backward enters next, NULL: of another unit */
void branch_foresee(const Block *b, const Branch *s);
Tensor branch_leave_backward(const Block *b, const Branch *s);
void branch_last_dw(const Block *b, LinearGrad last);
void branch_enter_backward(const Block *b, const Branch *s, Tensor dy, LinearGrad last,
                           bool wants_dx, const Branch *next);

/* dres = [dres +] the gradient of a norm's input x, from that of its output, work->dh. */
void branch_norm_backward(const Stream *stream, const BackwardScratch *work, Tensor dnorm, Tensor x,
                          const float *stats, Tensor norm, bool accumulate);
