/* One transformer block, forward and backward: COAT's precision flow [arXiv 2410.19313, sec. 4].
 * The recipe chooses the formats (activations.h); this code is the same for all recipes.
 *
 *     r1 = r0 + Wout Attention(Norm(r0))            r0 = a->attn_res, r1 = a->mlp_res
 *     r2 = r1 + Wdown SwiGLU(Norm(r1))              r2 = next->attn_res
 *
 * branch.h places the norms and the exchanges between ranks. If output and input of an operation
 * share memory, the operation does nothing (quantize) or works in place. So a recipe that stores
 * input and output in the same format needs memory for one tensor only. */
#include "model/block/block.h"

#include "model/block/attend.h"
#include "model/block/branch.h"
#include "model/block/experts.h"
#include "model/block/tile.h"

static const Tensor NONE = { 0 };
static const LoraProduct NO_PRODUCT = { 0 };

/* ---- forward --------------------------------------------------------------------------------- */

/* has_output: attn_saved already holds the output of attention. */
static void forward_attention(const Block *b, bool has_output)
{
    const Acts *a = b->a;
    const Branch s = branch_attention(b);
    const Tensor h = branch_enter(b, &s);
    const LoraProduct added = linear_defer_adapter(&s.first, a->qkv_raw, h);
    rope_forward(a->qkv_rotated, a->qkv_saved, a->qk_stats, a->qkv_raw, added, b->w->qnorm,
                 b->w->knorm, a->attn, b->stream->recipe.forward);
    if (!has_output) {
        attend(b->stream, a);
        quantize(a->attn_saved, a->attn_out);
    }
    quantize(linear_rows(a->attn_operand), a->attn_saved);
    branch_leave(b, &s, a->attn_operand);
}

/* Computes the operand of the MLP's last layer from the MLP's input; returns the branch. If one
 * kernel computes the first layer and SwiGLU, gate_up_raw may stay unwritten. */
static Branch forward_to_act(const Block *b)
{
    const Acts *a = b->a;
    const Branch s = branch_mlp(b);
    const Tensor h = branch_enter(b, &s);
    const Tensor act = a->keep == KEEP_INPUTS ? linear_rows(a->swiglu_operand) : a->swiglu_operand;
    if (b->stream->recipe.forward == FROM_EXACT && !linear_has_adapter(&s.first))
        matmul_swiglu(act, a->gate_up_saved, a->gate_up_raw, h, s.first.w.matrix);
    else
        swiglu_forward(act, a->gate_up_saved, a->gate_up_raw,
                       linear_defer_adapter(&s.first, a->gate_up_raw, h),
                       b->stream->recipe.forward);
    return s;
}

static void forward_mlp(const Block *b)
{
    for (Tile t = { 0 }; tile_next(&t, b);) {
        const Branch s = forward_to_act(&t.block);
        branch_leave(&t.block, &s, t.block.a->swiglu_operand);
    }
}

static bool has_experts(const Block *b)
{
    return b->a->experts.experts > 0;
}

void block_forward(const Stream *stream, const UnitTensors *w, const Acts *a, const Acts *next)
{
    const Block b = { .stream = stream, .w = w, .a = a, .next = next, .work = &stream->work };
    forward_attention(&b, false);
    if (has_experts(&b))
        experts_forward(&b);
    else
        forward_mlp(&b);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Computes the gradient of gate and up from dy, the gradient of the MLP's output. dact, the
 * gradient of SwiGLU's output, may stay unwritten. Recomputes the parts of act that the recipe does
 * not keep. */
static void swiglu_to_gate_up(const Block *b, const LinearLayer *down, Tensor dy)
{
    const Acts *a = b->a;
    const Tensor dact = a->dact,
                 act = a->keep == KEEP_INPUTS ? linear_input(down, a->swiglu_operand) : NONE;
    if (linear_has_adapter(down))
        swiglu_backward(a->dgate_up, act, dact, linear_dx_defer_adapter(down, dact, dy),
                        a->gate_up_saved);
    else
        matmul_dx_swiglu(a->dgate_up, act, dact, dy, down->w.matrix, a->gate_up_saved);
}

static void backward_mlp(const Block *b)
{
    const Branch s = branch_mlp(b), attention = branch_attention(b);
    const LinearGrad down = { &s.last, branch_leave_backward(b, &s), b->a->swiglu_operand };
    swiglu_to_gate_up(b, &s.last, down.dy);
    branch_last_dw(b, down);
    branch_enter_backward(b, &s, b->a->dgate_up, down, true, &attention);
}

/* Backward of the MLP, tile by tile; first recomputes what backward reads. */
static void backward_mlp_tiles(const Block *b)
{
    for (Tile t = { 0 }; tile_next(&t, b);) {
        if (keep_recomputes(b->a->keep)) {
            const Branch s = forward_to_act(&t.block);
            branch_leave_again(&t.block, &s, t.block.a->swiglu_operand);
        }
        backward_mlp(&t.block);
    }
}

/* Recomputes what attention and the output projection read in backward: the q, k and v that
 * attention read, the output of attention, and the projection's operand. transposed: a gradient
 * reads the transpose of the projection's operand. */
static void recompute_attention(const Block *b, bool transposed)
{
    const Acts *a = b->a;
    if (a->qkv_rotated.data != a->qkv_saved.data)
        rope_forward(a->qkv_rotated, a->qkv_saved, a->qk_stats, a->qkv_saved, NO_PRODUCT,
                     b->w->qnorm, b->w->knorm, a->attn, FROM_SAVED);
    if (transposed && a->attn_operand.data == a->attn_saved.data)
        expand_operand(a->attn_out, a->attn_operand);
    else {
        quantize(a->attn_out, a->attn_saved);
        if (transposed)
            quantize_codes(linear_transpose(a->attn_operand), a->attn_saved);
    }
}

/* The gradient of the output projection's adapter A reads attn_out, which the backward of attention
 * needs anyway. Otherwise attn_operand would have to be encoded again. */
static void backward_attention(const Block *b, BackwardStep step)
{
    const Acts *a = b->a;
    const Branch s = branch_attention(b), below = branch_mlp(b);
    const bool trains_out = linear_trains_matrix(&s.last);

    recompute_attention(b, a->attn_operand.data_t && trains_out);
    const LinearGrad out = { &s.last, branch_leave_backward(b, &s),
                             trains_out ? a->attn_operand : a->attn_out };
    linear_dx(&s.last, b->work->datt, out.dy, false);
    branch_last_dw(b, out);
    attend_backward(b->stream, a);
    rope_backward(a->dqkv_op, b->dw->qnorm, b->dw->knorm, b->work->dqkv, a->qkv_saved, a->qk_stats,
                  b->w->qnorm, b->w->knorm, a->attn);
    branch_enter_backward(b, &s, a->dqkv_op, out, step.needs_dx || tensor_exists(s.dnorm),
                          step.before_layer ? &below : NULL);
}

void block_backward(const Stream *stream, const UnitTensors *w, UnitTensors *dw, const Acts *a,
                    const Acts *next, BackwardStep step)
{
    const Block b = { stream, w, dw, a, next, &stream->work };
    const Branch mlp = branch_mlp(&b);
    if (!step.after_layer)
        branch_foresee(&b, &mlp);
    if (keep_recomputes(a->keep))
        forward_attention(&b, a->keep == KEEP_ATTENTION);
    if (has_experts(&b))
        experts_backward(&b);
    else
        backward_mlp_tiles(&b);
    backward_attention(&b, step);
}
