/* One transformer block, forward and backward. The formats are the recipe's (buffers.h, Acts); the
 * text is the same for all.
 *
 *     pre-norm (Llama, OLMo-1)                      norm_after (OLMo-2)
 *     r1 = r0 + Wout Attention(Norm(r0))            r1 = r0 + Norm(Wout Attention(r0))
 *     r2 = r1 + Wdown SwiGLU(Norm(r1))              r2 = r1 + Norm(Wdown SwiGLU(r1))
 *
 * r0 is a->attn_res, r1 a->mlp_res and r2 the next block's attn_res. An operation whose output is
 * its input's memory does nothing (quantize) or works in place, so a recipe that stores two of
 * these tensors alike pays for one. */
#include "model/block/block.h"

#include "model/parallel/context.h"
#include "model/parallel/tensor_ranks.h"
#include "model/block/tile.h"

static const Tensor NONE = { 0 };
static const LoraProduct NO_PRODUCT = { 0 };

/* Forward reads the rows of an FP8 operand, backward its transpose. An operand that backward
 * recomputes gets its rows in forward and its transpose in backward; other formats have one copy
 * for both. */
static Tensor rows_only(Tensor t)
{
    t.data_t = NULL;
    return t;
}

static Tensor transpose_only(Tensor t)
{
    if (t.data_t)
        t.data = NULL;
    return t;
}

static Tensor forward_operand(const Acts *a, Tensor t)
{
    return a->keep == KEEP_INPUTS ? rows_only(t) : t;
}

/* h as forward makes it: with norm_after it is not recomputed. */
static Tensor branch_operand(const Model *m, const Acts *a, Tensor h)
{
    return m->config->norm_after ? h : forward_operand(a, h);
}

/* y = [residual +] the norm of the stream, which is saved as x; the recipe says whether forward
 * sees the rounding of x. */
static void norm(const Model *m, Tensor y, Tensor x, float *stats, Tensor stream, Tensor w,
                 Tensor residual)
{
    norm_forward(y, x, stats, stream, w, residual, m->config->norm, m->recipe.forward);
}

static void rope(const Model *m, const Acts *a, const UnitTensors *w, LoraProduct product)
{
    rope_forward(a->qkv_rotated, a->qkv_saved, a->qk_stats, a->qkv_raw, product, w->qnorm, w->knorm,
                 a->attn, m->recipe.forward);
}

/* The mix of values that each token sees: of the micro-batch, or with a cache also of those before
 * it. */
static void attend(const Model *m, const Acts *a)
{
    if (a->cache.k.data)
        attention_cached(a->attn_out, a->qkv_rotated, a->cache, a->attn);
    else if (context_attends_whole(m)) {
        const Tensor qkv = context_heads(m, a, m->work.qkv_heads, a->qkv_rotated);
        const Tensor mix = context_buffer(m, m->work.attn_out_heads, a->attn_out);
        attention_forward(mix, a->lse, qkv, a->heads, m->docs);
        context_tokens(m, a, a->attn_out, mix);
    }
    if (m->own_docs.count > 0)
        attention_forward(a->attn_out, a->own_lse, a->qkv_rotated, a->attn, m->own_docs);
}

/* m->work.dqkv from m->work.datt. */
static void attend_backward(const Model *m, const Acts *a)
{
    const BackwardScratch *t = &m->work;
    if (context_attends_whole(m)) {
        const Tensor dy = context_heads(m, a, t->datt_heads, t->datt),
                     qkv = context_heads(m, a, t->qkv_heads, a->qkv_rotated);
        const Tensor mix = context_heads(m, a, t->attn_out_heads, a->attn_out),
                     dqkv = context_buffer(m, t->dqkv_heads, t->dqkv);
        attention_backward(dqkv, dy, qkv, mix, a->lse, a->heads, m->docs);
        context_tokens(m, a, t->dqkv, dqkv);
    }
    if (m->own_docs.count > 0)
        attention_backward(t->dqkv, t->datt, a->qkv_rotated, a->attn_out, a->own_lse, a->attn,
                           m->own_docs);
}

static bool is_trained(Tensor dw)
{
    return dw.data != NULL;
}

/* The matrix of a linear layer, and its adapter's; of weights or of gradients. */
static Tensor matrix(const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv, w->out, w->gate_up, w->down };
    return of[l];
}

/* The matrix as forward multiplies it. */
static Tensor forward_matrix(const Model *m, const UnitTensors *w, const Acts *a, Linear l)
{
    if (l != LINEAR_DOWN || !a->swiglu_operand.channel)
        return matrix(w, l);
    fold_channels(m->down_folded, rows_only(w->down), a->swiglu_operand.channel);
    return m->down_folded;
}

static Tensor bias(const UnitTensors *w, Linear l)
{
    return l == LINEAR_QKV ? w->qkv_bias : NONE;
}

static LoraMatrix adapter_a(const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv_a, w->out_a, w->gate_up_a, w->down_a };
    return (LoraMatrix){ .w = of[l], .num_parts = 1, .part = { { 0, of[l].cols } } };
}

static LoraMatrix adapter_b(const Model *m, const UnitTensors *w, Linear l)
{
    const Tensor of[NUM_LINEARS] = { w->qkv_b, w->out_b, w->gate_up_b, w->down_b };
    LoraMatrix b = adapter_parts(m->config, l);
    b.w = of[l];
    return b;
}

/* y = x w^T [+ add] and, where the layer has an adapter, + (scale x A^T) B^T: that is written
 * first, and the base's GEMM adds to it. In the other order lora_widen would read y; a GEMM reads
 * what it adds while it multiplies. */
static void linear(const Model *m, Linear l, Tensor y, Tensor x, const UnitTensors *w,
                   const Acts *a, Tensor add)
{
    if (acts_xa(a, l).data) {
        lora_narrow(acts_xa(a, l), x, adapter_a(w, l), m->lora_scale);
        lora_widen(y, acts_xa(a, l), adapter_b(m, w, l), add);
        add = y;
    }
    matmul(y, x, forward_matrix(m, w, a, l), add);
}

/* The same for a branch's first layer, whose output goes into an operation that can add: y = x w^T
 * [+ bias], and what that operation is to add while it reads y. So y is written once, and read
 * once. */
static LoraProduct linear_defer_adapter(const Model *m, Linear l, Tensor y, Tensor x,
                                        const UnitTensors *w, const Acts *a)
{
    if (acts_xa(a, l).data)
        lora_narrow(acts_xa(a, l), x, adapter_a(w, l), m->lora_scale);
    matmul(y, x, matrix(w, l), bias(w, l));
    return acts_xa(a, l).data ? (LoraProduct){ acts_xa(a, l), adapter_b(m, w, l) } : NO_PRODUCT;
}

/* swiglu_operand from mlp_h. One kernel for both may leave gate_up_raw unwritten. */
static void linear_swiglu(const Model *m, const UnitTensors *w, const Acts *a)
{
    const Tensor act = forward_operand(a, a->swiglu_operand), h = branch_operand(m, a, a->mlp_h);
    if (m->recipe.forward == FROM_EXACT && !acts_xa(a, LINEAR_GATE_UP).data)
        matmul_swiglu(act, a->gate_up_saved, a->gate_up_raw, h, w->gate_up);
    else
        swiglu_forward(act, a->gate_up_saved, a->gate_up_raw,
                       linear_defer_adapter(m, LINEAR_GATE_UP, a->gate_up_raw, h, w, a),
                       m->recipe.forward);
}

/* With tensor ranks those of a branch's two layers exist at the same time. */
static Tensor dxa(const Model *m, const Acts *a, Linear l)
{
    const Tensor all = m->work.dxa;
    const bool second = m->tensor_ranks > 1 && (l == LINEAR_OUT || l == LINEAR_DOWN);
    const size_t first =
        second ? (size_t)all.rows * (size_t)(all.cols / (LORA_PARTS + 1) * LORA_PARTS) : 0;
    return tensor_at((char *)all.data + first * dtype_size(all.format.dtype), all.format,
                     acts_xa(a, l).rows, acts_xa(a, l).cols);
}

/* What a layer's gradients read of its FP8 input: the transpose if the matrix is trained, the rows
 * if only the adapter is, NONE if neither; what is not read is not made. */
static Tensor for_dw(Tensor x, const UnitTensors *dw, Linear l)
{
    return is_trained(matrix(dw, l))        ? transpose_only(x)
           : is_trained(adapter_a(dw, l).w) ? rows_only(x)
                                            : NONE;
}

/* Leaves the gradient of `xa`, where the layer has an adapter, in m->work.dxa, for linear_dw. */
static void linear_dxa(const Model *m, Linear l, Tensor dy, const UnitTensors *w, const Acts *a)
{
    if (acts_xa(a, l).data)
        lora_narrow(dxa(m, a, l), dy, adapter_b(m, w, l), m->lora_scale);
}

/* dx = [dx +] dy w, and the adapter's part; does what linear_dxa does. */
static void linear_dx(const Model *m, Linear l, Tensor dx, Tensor dy, const UnitTensors *w,
                      const Acts *a, bool accumulate)
{
    linear_dxa(m, l, dy, w, a);
    if (acts_xa(a, l).data) {
        lora_widen(dx, dxa(m, a, l), adapter_a(w, l), accumulate ? dx : NONE);
        accumulate = true;
    }
    matmul_dx(dx, dy, matrix(w, l), accumulate);
}

/* dx = dy w, and what the operation that reads dx is to add; does what linear_dxa does. */
static LoraProduct linear_dx_defer_adapter(const Model *m, Linear l, Tensor dx, Tensor dy,
                                           const UnitTensors *w, const Acts *a)
{
    linear_dxa(m, l, dy, w, a);
    matmul_dx(dx, dy, matrix(w, l), false);
    return acts_xa(a, l).data ? (LoraProduct){ dxa(m, a, l), adapter_a(w, l) } : NO_PRODUCT;
}

/* From the gradient of the MLP's output to that of gate and up, by way of dact, which may stay
 * unwritten. act: made again. */
static void linear_swiglu_backward(const Model *m, Tensor act, Tensor dy, const UnitTensors *w,
                                   const Acts *a)
{
    const Tensor dact = m->work.dact;
    if (acts_xa(a, LINEAR_DOWN).data)
        swiglu_backward(a->dgate_up, act, dact,
                        linear_dx_defer_adapter(m, LINEAR_DOWN, dact, dy, w, a), a->gate_up_saved);
    else
        matmul_dx_swiglu(a->dgate_up, act, dact, dy, w->down, a->gate_up_saved);
}

/* What a layer's gradients are made of: that of its output, and its input as for_dw says. */
typedef struct {
    Linear l;
    Tensor dy, x;
} Layer;

/* dw += dy^T x, the same for a bias, or for the adapter's A and B. Call it after linear_dx,
 * linear_dx_defer_adapter or linear_dxa. */
static void linear_dw(const Model *m, const UnitTensors *dw, Layer s, const Acts *a)
{
    matmul_dw(matrix(dw, s.l), s.dy, s.x);
    matmul_db(bias(dw, s.l), s.dy);
    if (is_trained(adapter_a(dw, s.l).w)) {
        lora_dw(adapter_b(m, dw, s.l), acts_xa(a, s.l), s.dy);
        lora_dw(adapter_a(dw, s.l), dxa(m, a, s.l), s.x);
    }
}

/* The operand of a branch's first GEMM from the residual stream. x, stats: what the norm's backward
 * reads. */
static void branch_in(const Model *m, const Acts *a, Tensor h, Tensor x, float *stats, Tensor res,
                      Tensor w)
{
    const Tensor operand = branch_operand(m, a, h),
                 y = m->config->norm_after ? res : rows_buffer(m, operand);
    if (!m->config->norm_after)
        norm(m, y, x, stats, res, w, NONE);
    if (m->tensor_ranks > 1) {
        gather_rows_begin(m, operand, y);
        gather_rows_end(m, operand);
    } else if (m->config->norm_after)
        quantize(operand, res);
}

/* out = res + the branch's last layer, of y, with its norm if the architecture puts it there.
 * branch: where the layer writes in front of that norm; x: the same, as saved for its backward. */
static void branch_out(const Model *m, Linear l, Tensor out, Tensor y, const UnitTensors *w,
                       const Acts *a, Tensor res, Tensor branch, Tensor x, float *stats,
                       Tensor weight)
{
    const bool adds = !m->config->norm_after && m->tensor_ranks == 1;
    const Tensor buffer = sums_buffer(m, m->config->norm_after ? branch : out);
    linear(m, l, buffer, y, w, a, adds ? res : NONE);
    if (m->config->norm_after)
        norm(m, out, x, stats, sum_rows(m, buffer), weight, res);
    else if (!adds)
        add_rows(m, out, res, buffer);
}

/* From the block's input to the MLP's. */
static void up_to_mlp(const Model *m, const UnitTensors *w, const Acts *a, bool has_attention)
{
    LoraProduct product;

    branch_in(m, a, a->attn_h, a->attn_x, a->attn_stats, a->attn_res, w->attn_norm);
    product =
        linear_defer_adapter(m, LINEAR_QKV, a->qkv_raw, branch_operand(m, a, a->attn_h), w, a);
    rope(m, a, w, product);
    if (!has_attention) {
        attend(m, a);
        quantize(a->attn_saved, a->attn_out);
    }
    quantize(rows_only(a->attn_operand), a->attn_saved);
    branch_out(m, LINEAR_OUT, a->mlp_res, a->attn_operand, w, a, a->attn_res, a->attn_branch,
               a->attn_x, a->attn_stats, w->attn_norm);
}

/* From the MLP's input to the operand of its last layer. */
static void up_to_act(const Model *m, const UnitTensors *w, const Acts *a)
{
    branch_in(m, a, a->mlp_h, a->mlp_x, a->mlp_stats, a->mlp_res, w->mlp_norm);
    linear_swiglu(m, w, a);
}

static void from_act(const Model *m, const UnitTensors *w, const Acts *a, const Acts *next)
{
    branch_out(m, LINEAR_DOWN, next->attn_res, a->swiglu_operand, w, a, a->mlp_res, a->mlp_branch,
               a->mlp_x, a->mlp_stats, w->mlp_norm);
}

void block_forward(const Model *m, const UnitTensors *w, Acts *a, Acts *next)
{
    up_to_mlp(m, w, a, false);
    for (int n = 0; n < a->mlp_res.rows; n += mlp_rows(m, a->keep)) {
        const Tile t = tile_of(m, a, next, n);
        up_to_act(&t.m, w, &t.a);
        from_act(&t.m, w, &t.a, &t.next);
    }
}

/* Only a norm's backward reads what the last layer writes; an adapter's reads the adapter's first
 * product. */
static void mlp_recompute(const Model *m, const UnitTensors *w, const Acts *a, const Acts *next)
{
    up_to_act(m, w, a);
    if (m->config->norm_after)
        from_act(m, w, a, next);
    else if (acts_xa(a, LINEAR_DOWN).data)
        lora_narrow(acts_xa(a, LINEAR_DOWN), a->swiglu_operand, adapter_a(w, LINEAR_DOWN),
                    m->lora_scale);
}

/* dres = [dres +] the gradient of a norm's input, from that of its output, dh. With dres_amax only
 * this writes dres: so it still is max|dres| in branch_out_backward_begin. */
void norm_to_stream_backward(const Model *m, Tensor dnorm, Tensor x, const float *stats,
                             Tensor norm, bool accumulate)
{
    const BackwardScratch *t = &m->work;
    norm_backward(t->dres, t->dres_amax, dnorm, own_rows(m, t->dh), x, stats, norm, m->config->norm,
                  accumulate);
}

/* A branch as its backward sees it: its first layer with its input h, and its norm with its input
 * x. */
typedef struct {
    Linear first;
    Tensor h, x, norm, dnorm;
    const float *stats;
} Branch;

static Branch attention_of(const UnitTensors *w, const UnitTensors *dw, const Acts *a)
{
    return (Branch){ LINEAR_QKV, a->attn_h, a->attn_x, w->attn_norm, dw->attn_norm, a->attn_stats };
}

static Branch mlp_of(const UnitTensors *w, const UnitTensors *dw, const Acts *a)
{
    return (Branch){ LINEAR_GATE_UP, a->mlp_h, a->mlp_x, w->mlp_norm, dw->mlp_norm, a->mlp_stats };
}

/* From the gradient of the residual stream to that of the branch's last GEMM: dy, in m->work.dy.
 * amax: max|dres|, or NULL if not known. Tensor ranks begin to gather it: until
 * branch_out_backward_end nothing may change dy or dres. */
static void branch_out_backward_begin(const Model *m, const Branch *b, const float *amax)
{
    const Tensor dy = m->work.dy, y = rows_buffer(m, dy);
    if (m->config->norm_after)
        norm_backward(y, NULL, b->dnorm, m->work.dres, b->x, b->stats, b->norm, m->config->norm,
                      false);
    if (m->tensor_ranks > 1)
        gather_rows_begin(m, dy, m->config->norm_after ? y : m->work.dres);
    else if (!m->config->norm_after)
        quantize_with_amax(dy, m->work.dres, amax);
}

/* Whether tensor ranks gather the stream's gradient as dy, which they can begin before the branch
 * is at work. */
static bool gathers_stream(const Model *m)
{
    return m->tensor_ranks > 1 && !m->config->norm_after;
}

static Tensor branch_out_backward_end(const Model *m)
{
    if (m->tensor_ranks > 1)
        gather_rows_end(m, m->work.dy);
    return m->work.dy;
}

/* dres += the branch's part, from the gradient of the first layer's output: through the layer, then
 * through the norm. */
static void stream_backward_begin(const Model *m, const Branch *b, Tensor dy, const UnitTensors *w,
                                  const Acts *a)
{
    const bool after = m->config->norm_after;
    const Tensor buffer = after ? sums_buffer(m, m->work.dres) : m->work.dh;
    linear_dx(m, b->first, buffer, dy, w, a, after && m->tensor_ranks == 1);
    if (m->tensor_ranks > 1)
        sum_rows_begin(m, buffer);
}

static void stream_backward_end(const Model *m, const Branch *b)
{
    const bool after = m->config->norm_after;
    if (m->tensor_ranks > 1) {
        const Tensor sums = sum_rows_end(m, after ? m->work.partial : m->work.dh);
        if (after)
            accumulate(m->work.dres, sums);
    }
    if (!after)
        norm_to_stream_backward(m, b->dnorm, b->x, b->stats, b->norm, true);
}

/* From the gradient dy of the first layer's output to that of the stream, if that is wanted, and to
 * the layer's gradients. Its input is recomputed from the saved norm input where the recipe keeps
 * no other.
 *
 * With tensor ranks each exchange overlaps a product: the gather of the input that of dx, the sum
 * of dx those of the gradients of `last`, the branch's last layer, and the gather of the next
 * branch's dy (NULL: none) those of the first layer's gradients. On one rank the caller has
 * computed those of `last`, which frees memory. */
static void branch_in_backward(const Model *m, const Branch *b, Tensor dy, Layer last,
                               const UnitTensors *w, const UnitTensors *dw, const Acts *a,
                               bool wants_dx, const Branch *next)
{
    const bool alone = m->tensor_ranks == 1;
    const Tensor wanted = for_dw(b->h, dw, b->first);
    const bool recomputes =
        tensor_exists(wanted) && a->keep == KEEP_INPUTS && !m->config->norm_after;

    if (recomputes && !alone) {
        norm_recompute(own_rows(m, b->h), b->x, b->stats, b->norm);
        gather_again(m, b->h);
    }
    if (wants_dx)
        stream_backward_begin(m, b, dy, w, a);
    else
        linear_dxa(m, b->first, dy, w, a);
    if (!alone)
        linear_dw(m, dw, last, a);
    if (wants_dx)
        stream_backward_end(m, b);
    if (next && !alone)
        branch_out_backward_begin(m, next, NULL);
    if (recomputes && alone)
        norm_recompute(wanted, b->x, b->stats, b->norm);
    else if (recomputes)
        complete_again(m, b->h, wanted);
    linear_dw(m, dw, (Layer){ b->first, dy, b->h }, a);
}

/* The attention output, and of its operand the transpose if a gradient reads it. */
static void attention_output_recompute(const Acts *a, bool transposed)
{
    if (transposed && a->attn_operand.data == a->attn_saved.data)
        expand_operand(a->attn_out, a->attn_operand);
    else {
        quantize(a->attn_out, a->attn_saved);
        if (transposed)
            quantize_codes(transpose_only(a->attn_operand), a->attn_saved);
    }
}

static void mlp_backward(const Model *m, const UnitTensors *w, const UnitTensors *dw, const Acts *a)
{
    const Tensor act_recomputed =
        a->keep == KEEP_INPUTS ? for_dw(a->swiglu_operand, dw, LINEAR_DOWN) : NONE;
    const Branch mlp = mlp_of(w, dw, a), attention = attention_of(w, dw, a);
    if (!gathers_stream(m)) /* otherwise block_backward has begun */
        branch_out_backward_begin(m, &mlp, m->work.dres_amax);
    const Layer down = { LINEAR_DOWN, branch_out_backward_end(m), a->swiglu_operand };
    linear_swiglu_backward(m, act_recomputed, down.dy, w, a);
    if (m->tensor_ranks == 1)
        linear_dw(m, dw, down, a);
    branch_in_backward(m, &mlp, a->dgate_up, down, w, dw, a, true, &attention);
}

/* Tile by tile, with what backward runs again. The first tile may overwrite gradients, the others
 * add to them. */
static void mlp_tiles_backward(const Model *m, const UnitTensors *w, const UnitTensors *dw,
                               const Acts *a, const Acts *next)
{
    UnitTensors sums = *dw;
    for (int n = 0; n < m->rows; n += mlp_rows(m, a->keep)) {
        const Tile t = tile_of(m, a, next, n);
        if (keep_recomputes(a->keep))
            mlp_recompute(&t.m, w, &t.a, &t.next);
        mlp_backward(&t.m, w, &sums, &t.a);
        for (int i = 0; i < NUM_PARAMS; i++)
            sums.tensor[i].empty = false;
    }
}

/* On entry m->work.dres is dLoss/d(r2), on return, if `needs_dx`, dLoss/d(r0); without it only the
 * weight gradients of this block are computed. Weight gradients are added to dw. The gradient of
 * the output projection's adapter A reads attn_out, which attention's backward needs anyway;
 * attn_operand would have to be encoded again. What the recipe does not keep is recomputed where it
 * is read: act by SwiGLU's backward, the rest as in forward. goes_on: the backward pass goes on to
 * the block below. */
void block_backward(const Model *m, const UnitTensors *w, UnitTensors *dw, const Acts *a,
                    const Acts *next, bool needs_dx, bool goes_on)
{
    const BackwardScratch *t = &m->work;
    const Branch attention = attention_of(w, dw, a);

    if (gathers_stream(m) && !m->dy_begun)
        branch_out_backward_begin(m, &attention, NULL);
    if (keep_recomputes(a->keep))
        up_to_mlp(m, w, a, a->keep == KEEP_ATTENTION);
    mlp_tiles_backward(m, w, dw, a, next);

    if (a->qkv_rotated.data != a->qkv_saved.data)
        rope_forward(a->qkv_rotated, a->qkv_saved, a->qk_stats, a->qkv_saved, NO_PRODUCT, w->qnorm,
                     w->knorm, a->attn, FROM_SAVED);
    attention_output_recompute(a, a->attn_operand.data_t && is_trained(dw->out));
    if (m->tensor_ranks == 1)
        branch_out_backward_begin(m, &attention, in_tiles(m, a) ? NULL : t->dres_amax);
    const Layer out = { LINEAR_OUT, branch_out_backward_end(m),
                        is_trained(dw->out) ? a->attn_operand : a->attn_out };
    linear_dx(m, LINEAR_OUT, t->datt, out.dy, w, a, false);
    if (m->tensor_ranks == 1)
        linear_dw(m, dw, out, a);
    attend_backward(m, a);
    rope_backward(a->dqkv_op, dw->qnorm, dw->knorm, t->dqkv, a->qkv_saved, a->qk_stats, w->qnorm,
                  w->knorm, a->attn);
    /* of which then nothing is read */
    branch_in_backward(m, &attention, a->dqkv_op, out, w, dw, a,
                       needs_dx || is_trained(dw->attn_norm),
                       goes_on && gathers_stream(m) ? &attention : NULL);
}
