#include "model/block/branch.h"

#include "model/block/tile.h"
#include "model/parallel/tensor_ranks.h"

static const Tensor NONE = { 0 };

/* Whether tensor ranks gather the gradient of the stream. Pre-norm branches do, because their
 * backward starts from this gradient. With norm_after, backward first passes through a norm. */
static bool gathers_stream(const Stream *stream)
{
    return stream->tensor_ranks > 1 && !stream->config->norm_after;
}

Branch branch_attention(const Block *b)
{
    const Acts *a = b->a;
    return (Branch){ .first = linear_layer(b, LINEAR_QKV),
                     .last = linear_layer(b, LINEAR_OUT),
                     .res = a->attn_res,
                     .out = a->mlp_res,
                     .h = a->attn_h,
                     .x = a->attn_x,
                     .stats = a->attn_stats,
                     .output = a->attn_branch,
                     .norm = b->w->attn_norm,
                     .dnorm = b->dw ? b->dw->attn_norm : NONE,
                     .amax = b->work && !tile_is_partial(b->stream, a) ? b->work->dres_amax : NULL,
                     .foresees = b->stream->tensor_ranks > 1 };
}

Branch branch_mlp(const Block *b)
{
    const Acts *a = b->a;
    return (Branch){ .first = linear_layer(b, LINEAR_GATE_UP),
                     .last = linear_layer(b, LINEAR_DOWN),
                     .res = a->mlp_res,
                     .out = b->next->attn_res,
                     .h = a->mlp_h,
                     .x = a->mlp_x,
                     .stats = a->mlp_stats,
                     .output = a->mlp_branch,
                     .norm = b->w->mlp_norm,
                     .dnorm = b->dw ? b->dw->mlp_norm : NONE,
                     .amax = b->work ? b->work->dres_amax : NULL,
                     .foresees = gathers_stream(b->stream) };
}

/* y = [residual +] the norm of the stream, which is saved as x. The recipe says whether forward
 * reads the rounded x. */
static void norm(const Block *b, const Branch *s, Tensor y, Tensor res, Tensor residual)
{
    norm_forward(y, s->x, s->stats, res, s->norm, residual, b->stream->config->norm,
                 b->stream->recipe.forward);
}

/* With norm_after, backward does not recompute h; so forward keeps all rows of h. */
Tensor branch_enter(const Block *b, const Branch *s)
{
    const Stream *stream = b->stream;
    const bool after = stream->config->norm_after;
    const Tensor h = !after && b->a->keep == KEEP_INPUTS ? linear_rows(s->h) : s->h,
                 y = after ? s->res : rows_buffer(stream, h);
    if (!after)
        norm(b, s, y, s->res, NONE);
    if (stream->tensor_ranks > 1) {
        gather_rows_begin(stream, h, y);
        gather_rows_end(stream, h);
    } else if (after)
        quantize(h, s->res);
    return h;
}

void branch_leave(const Block *b, const Branch *s, Tensor y)
{
    const Stream *stream = b->stream;
    const bool after = stream->config->norm_after, adds = !after && stream->tensor_ranks == 1;
    const Tensor buffer = sums_buffer(stream, after ? s->output : s->out);
    linear(&s->last, buffer, y, adds ? s->res : NONE);
    if (after)
        norm(b, s, s->out, sum_rows(stream, buffer), s->res);
    else if (!adds)
        add_rows(stream, s->out, s->res, buffer);
}

void branch_leave_again(const Block *b, const Branch *s, Tensor y)
{
    if (b->stream->config->norm_after)
        branch_leave(b, s, y);
    else
        linear_recompute_xa(&s->last, y);
}

/* If dres_amax is computed, no other operation writes dres. So dres_amax is still max|dres| when
 * the next branch reads it. */
void branch_norm_backward(const Stream *stream, const BackwardScratch *work, Tensor dnorm, Tensor x,
                          const float *stats, Tensor norm, bool accumulate)
{
    norm_backward(work->dres, work->dres_amax, dnorm, own_rows(stream, work->dh), x, stats, norm,
                  stream->config->norm, accumulate);
}

static void leave_backward_begin(const Block *b, const Branch *s)
{
    const Stream *stream = b->stream;
    const Tensor dy = b->work->dy, y = rows_buffer(stream, dy);
    if (stream->config->norm_after)
        norm_backward(y, NULL, s->dnorm, b->work->dres, s->x, s->stats, s->norm,
                      stream->config->norm, false);
    if (stream->tensor_ranks > 1)
        gather_rows_begin(stream, dy, stream->config->norm_after ? y : b->work->dres);
    else if (!stream->config->norm_after)
        quantize_with_amax(dy, b->work->dres, s->amax);
}

void branch_foresee(const Block *b, const Branch *s)
{
    if (s->foresees)
        leave_backward_begin(b, s);
}

Tensor branch_leave_backward(const Block *b, const Branch *s)
{
    if (!s->foresees)
        leave_backward_begin(b, s);
    if (b->stream->tensor_ranks > 1)
        gather_rows_end(b->stream, b->work->dy);
    return b->work->dy;
}

/* on one rank the weight gradients are computed at once, which frees memory */
void branch_last_dw(const Block *b, LinearGrad last)
{
    if (b->stream->tensor_ranks == 1)
        linear_dw(last);
}

/* dy is the gradient of the first layer's output. Both functions propagate dy back through this
 * layer and the norm, and add the result to dres. stream_backward_begin starts this work, and
 * stream_backward_end completes it. */
static void stream_backward_begin(const Block *b, const Branch *s, Tensor dy)
{
    const bool after = b->stream->config->norm_after;
    const Tensor buffer = after ? sums_buffer(b->stream, b->work->dres) : b->work->dh;
    linear_dx(&s->first, buffer, dy, after && b->stream->tensor_ranks == 1);
    if (b->stream->tensor_ranks > 1)
        sum_rows_begin(b->stream, buffer);
}

static void stream_backward_end(const Block *b, const Branch *s)
{
    const bool after = b->stream->config->norm_after;
    if (b->stream->tensor_ranks > 1) {
        const Tensor sums = sum_rows_end(b->stream, after ? b->work->partial : b->work->dh);
        if (after)
            accumulate(b->work->dres, sums);
    }
    if (!after)
        branch_norm_backward(b->stream, b->work, s->dnorm, s->x, s->stats, s->norm, true);
}

/* With tensor ranks each exchange overlaps a GEMM. The gather of the input overlaps the GEMM of dx.
 * The sum of dx overlaps the GEMMs of the last layer's gradients. The gather of the next branch's
 * dy overlaps the GEMMs of the first layer's gradients. */
void branch_enter_backward(const Block *b, const Branch *s, Tensor dy, LinearGrad last,
                           bool wants_dx, const Branch *next)
{
    const Stream *stream = b->stream;
    const bool alone = stream->tensor_ranks == 1;
    const Tensor wanted = linear_input(&s->first, s->h);
    const bool recomputes =
        tensor_exists(wanted) && b->a->keep == KEEP_INPUTS && !stream->config->norm_after;

    if (recomputes && !alone) {
        norm_recompute(own_rows(stream, s->h), s->x, s->stats, s->norm);
        gather_again(stream, s->h);
    }
    if (wants_dx)
        stream_backward_begin(b, s, dy);
    else
        linear_dxa(&s->first, dy);
    if (!alone)
        linear_dw(last);
    if (wants_dx)
        stream_backward_end(b, s);
    if (next)
        branch_foresee(b, next);
    if (recomputes && alone)
        norm_recompute(wanted, s->x, s->stats, s->norm);
    else if (recomputes)
        complete_again(stream, s->h, wanted);
    linear_dw((LinearGrad){ &s->first, dy, s->h });
}
