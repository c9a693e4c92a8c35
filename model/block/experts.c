#include "model/block/experts.h"

#include "kernels/runtime/device.h"

static const Tensor NONE = { 0 };

static const Experts *config_of(const Block *b)
{
    return &b->stream->config->experts;
}

/* Number of blocks with experts before block l. */
static int routers_before(const ModelConfig *c, int l)
{
    int count = 0;
    while (l-- > 0)
        count += layer_experts(c, l) > 0;
    return count;
}

/* ---- the router's losses --------------------------------------------------------------------- */

static bool is_pooled(const Block *b)
{
    return config_of(b)->balance == BALANCE_POOLED;
}

static Tensor stats_of(const Block *b)
{
    return tensor_at(b->a->router_stats, (Format){ F32, 0, false }, b->stream->router.groups,
                     router_stats_width(config_of(b)->count));
}

/* Computes the router's statistics. Context ranks add theirs up, because each has only some tokens
 * of a group. */
static void record_stats(const Block *b)
{
    if (!b->a->router_stats)
        return;
    router_stats(stats_of(b), b->a->router_logits, b->a->experts);
    if (b->stream->context > 1)
        comm_all_reduce(stats_of(b), RANKS_CONTEXT);
}

/* Returns the statistics of all blocks together. */
static void pool_stats(const Block *b)
{
    if (!b->a->router_stats || !is_pooled(b))
        return;
    if (routers_before(b->stream->config, b->a->layer) == 0)
        quantize(b->stream->router.pooled, stats_of(b)); /* a copy */
    else
        accumulate(b->stream->router.pooled, stats_of(b));
}

/* Adds the statistics and the load-balancing loss of the block to the sums of the step. */
static void report_stats(const Block *b)
{
    const RouterLosses *r = &b->stream->router;
    const ModelConfig *c = b->stream->config;
    const int l = b->a->layer, L = b->stream->L, E = c->experts.count;
    router_sum(tensor_rows(r->sums, l, 1), stats_of(b), E, is_pooled(b) ? 0 : r->balance);
    if (is_pooled(b) && routers_before(c, l + 1) == routers_before(c, L))
        router_sum(tensor_rows(r->sums, L, 1), r->pooled, E, r->balance);
}

/* A group of n tokens has the loss coef * E * sum over experts of (count / (k n)) (sum of p / n).
 * A step's loss is the mean over its groups and, unless pooled, over blocks. BALANCE_POOLED counts
 * all blocks as one group, and does not divide by k. */
void experts_begin_step(Stream *s, int sequences)
{
    const Experts *e = &s->config->experts;
    const bool pooled = e->balance == BALANCE_POOLED;
    const double L = routers_before(s->config, s->L), B = s->attn.B,
                 tokens = B * s->T / s->router.groups * (pooled ? L : 1),
                 share = B / s->router.groups / sequences;
    s->router.balance = e->balance == BALANCE_NONE
                            ? 0
                            : (float)(e->balance_coef * e->count / (tokens * tokens) * share /
                                      (pooled ? 1 : e->top_k * L));
    s->router.z = (float)(e->z_coef / (L * s->T * sequences));
}

/* ---- the router's bias ----------------------------------------------------------------------- */

static const float *bias_of(const Block *b)
{
    const Tensor bias = b->stream->router.bias;
    return bias.data ? tensor_rows(bias, b->a->layer, 1).data : NULL;
}

void experts_set_bias(Stream *s, const float *bias)
{
    const Tensor t = s->router.bias;
    if (t.data && bias)
        device_put(t.data, bias, tensor_bytes(t));
    else if (t.data)
        device_zero(t.data, tensor_bytes(t));
}

/* ---- linear layers of experts ---------------------------------------------------------------- */

/* y = x w^T + the adapter's product. */
static void experts_linear(const LinearLayer *l, Tensor y, Tensor x, Routing r)
{
    experts_matmul(y, x, l->w.matrix, r);
    if (!linear_has_adapter(l))
        return;
    experts_lora_narrow(l->xa, x, l->w.a, l->scale, r);
    experts_lora_widen(y, l->xa, l->w.b, r);
}

/* dx = dy w + the adapter's product. Leaves dxa for experts_linear_dw. */
static void experts_linear_dx(const LinearLayer *l, Tensor dx, Tensor dy, Routing r)
{
    experts_matmul_dx(dx, dy, l->w.matrix, r);
    if (!linear_has_adapter(l))
        return;
    experts_lora_narrow(l->dxa, dy, l->w.b, l->scale, r);
    experts_lora_widen(dx, l->dxa, l->w.a, r);
}

static void experts_linear_dw(const LinearLayer *l, Tensor dy, Tensor x, Routing r)
{
    experts_matmul_dw(l->dw.matrix, dy, x, r);
    if (!linear_has_adapter(l))
        return;
    experts_lora_dw(l->dw.b, l->xa, dy, r);
    experts_lora_dw(l->dw.a, l->dxa, x, r);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Computes the operand of the experts' last matrices from the stream; returns the branch. */
static Branch forward_to_act(const Block *b)
{
    const Acts *a = b->a;
    const Branch s = branch_mlp(b);
    const Tensor h = branch_enter(b, &s), x = linear_rows(a->expert_x);
    const Tensor act = a->keep == KEEP_INPUTS ? linear_rows(a->swiglu_operand) : a->swiglu_operand;
    matmul(a->router_logits, h, b->w->router, NONE);
    route(a->experts, a->router_logits, bias_of(b), config_of(b)->normalize);
    record_stats(b);
    experts_gather(x, h, NULL, a->experts);
    if (b->stream->recipe.forward == FROM_EXACT && !linear_has_adapter(&s.first))
        experts_matmul_swiglu(act, a->gate_up_saved, a->gate_up_raw, x, b->w->gate_up, a->experts);
    else {
        experts_linear(&s.first, a->gate_up_raw, x, a->experts);
        experts_swiglu(act, a->gate_up_saved, a->gate_up_raw, a->experts,
                       b->stream->recipe.forward);
    }
    return s;
}

void experts_forward(const Block *b)
{
    const Acts *a = b->a;
    const Branch s = forward_to_act(b);
    pool_stats(b);
    experts_linear(&s.last, a->expert_y, a->swiglu_operand, a->experts);
    experts_sum(s.out, a->expert_y, s.res, a->experts);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Computes the gradient of gate and up from the gradient of the MLP's output, and the gradient of
 * the experts' last layers. */
static void backward_to_gate_up(const Block *b, const Branch *s)
{
    const Acts *a = b->a;
    const BackwardScratch *t = b->work;
    const Tensor act = a->keep == KEEP_INPUTS ? linear_input(&s->last, a->swiglu_operand) : NONE;
    experts_gather(t->expert_dy, t->dres, s->amax, a->experts);
    if (linear_has_adapter(&s->last)) {
        experts_linear_dx(&s->last, a->dact, t->expert_dy, a->experts);
        experts_swiglu_backward(a->dgate_up, act, t->dweight.data, a->dact, a->gate_up_saved,
                                a->experts);
    } else
        experts_matmul_dx_swiglu(a->dgate_up, act, t->dweight.data, a->dact, t->expert_dy,
                                 s->last.w.matrix, a->gate_up_saved, a->experts);
    experts_linear_dw(&s->last, t->expert_dy, a->swiglu_operand, a->experts);
}

/* Computes the gradient of the norm's output h: through the experts, and through the router. */
static void backward_to_h(const Block *b, const Branch *s)
{
    const Acts *a = b->a;
    const BackwardScratch *t = b->work;
    const RouterLosses *r = &b->stream->router;
    experts_linear_dx(&s->first, t->expert_dx, a->dgate_up, a->experts);
    experts_sum(t->dh, t->expert_dx, NONE, a->experts);
    route_backward(t->drouter, t->dweight.data, a->router_logits, a->experts,
                   config_of(b)->normalize, is_pooled(b) ? r->pooled : stats_of(b), r->balance,
                   r->z);
    matmul_dx(t->dh, t->drouter, b->w->router, true);
}

void experts_backward(const Block *b)
{
    const Acts *a = b->a;
    const Branch s = keep_recomputes(a->keep) ? forward_to_act(b) : branch_mlp(b);
    const Tensor x = linear_input(&s.first, a->expert_x);
    const bool reads_h = b->dw->router.data || tensor_exists(x);
    if (keep_recomputes(a->keep) && linear_has_adapter(&s.last))
        experts_lora_narrow(s.last.xa, a->swiglu_operand, s.last.w.a, s.last.scale, a->experts);
    backward_to_gate_up(b, &s);
    backward_to_h(b, &s);
    report_stats(b);
    if (reads_h && a->keep == KEEP_INPUTS)
        norm_recompute(a->mlp_h, s.x, s.stats, s.norm);
    matmul_dw(b->dw->router, b->work->drouter, a->mlp_h);
    if (tensor_exists(x))
        experts_gather_again(x, a->mlp_h, a->experts);
    experts_linear_dw(&s.first, a->dgate_up, a->expert_x, a->experts);
    branch_norm_backward(b->stream, b->work, s.dnorm, s.x, s.stats, s.norm, true);
}
