/* Computes the position of every Tensor in the arena from recipe and configuration. The same
 * function runs twice: to measure, then to place. */
#include "model/plan/plan.h"

#include "model/parallel/context.h"
#include "model/store/offload.h"
#include "model/parallel/stages.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

/* Whether scales are valid for a whole step, in a run that trains. */
static bool has_scales_of_step(const Stream *s)
{
    return s->recipe.scales == PER_STEP && !s->forward_only;
}

/* arena: the unit's own memory. amaxes: memory for scale_amax of FP8 operands, if scales are valid
 * for a step. transposes: backward reads transposes of FP8 operands, for the gradients of the
 * blocks' matrices; if false, backward reads the rows of operands, for the gradients of adapters.
 * layer: the block. keep: what forward saves. rows: number of rows of tensors. */
struct Planner {
    Arena *arena, *amaxes;
    Model *m;
    Stream *stream; /* the stream of the unit that is planned */
    const ParamStore *store;
    bool transposes;
    int layer;
    Keep keep;
    int rows;
};

static size_t whole_256(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* A buffer of at least `bytes` bytes in the memory that all blocks share. */
void *plan_shared(Model *m, Buffer b, size_t bytes)
{
    OverlaidBuffer *s = &m->shared[b];
    const size_t whole = whole_256(bytes);
    /* blocks with another `keep` may need a larger buffer */
    s->bytes = whole > s->bytes ? whole : s->bytes;
    return (char *)m->shared_memory + s->at;
}

Tensor plan_shared_rows(Model *m, Buffer b, Format f, int rows, int cols)
{
    Arena measured = { 0 };
    tensor_alloc(&measured, f, rows, cols);
    return tensor_alloc(&(Arena){ .memory = plan_shared(m, b, measured.used) }, f, rows, cols);
}

static Tensor shared(const Planner *p, Buffer b, Format f, int cols)
{
    return plan_shared_rows(p->m, b, f, p->rows, cols);
}

Tensor plan_own(Planner *p, Format f, int cols)
{
    return tensor_alloc(p->arena, f, p->rows, cols);
}

/* Whether each block has its own memory for the tensors that forward leaves for backward. False if
 * backward reruns the block's forward. */
static bool leaves_own(const Planner *p)
{
    return !keep_recomputes(p->keep) && !p->stream->forward_only;
}

static Tensor place(Planner *p, bool is_own, Buffer b, Format f, int cols)
{
    return is_own ? plan_own(p, f, cols) : shared(p, b, f, cols);
}

static void add_scale_amax(const Planner *p, Tensor *t)
{
    if (!has_scales_of_step(p->stream) || !format_is_fp8(t->format) || t->format.group)
        return;
    t->scale_amax = arena_alloc(p->amaxes, sizeof(float));
    t->scale_reused = &p->m->scales_reused;
}

static void *bytes_of(Planner *p, bool is_own, Buffer b, size_t bytes)
{
    return is_own ? arena_alloc(p->arena, bytes) : plan_shared(p->m, b, bytes);
}

static float *floats(Planner *p, bool is_own, Buffer b, int per_token)
{
    return bytes_of(p, is_own, b, sizeof(float) * (size_t)p->rows * (size_t)per_token);
}

/* Adds the factors of an FP8 operand's columns, and memory for the weight that is multiplied by
 * their inverses. The factors are kept as long as the operand's range. */
static void add_channels(Planner *p, Tensor *t)
{
    Stream *s = p->stream;
    if (s->recipe.down_scales != DOWN_CHANNEL || !format_is_fp8(t->format))
        return;
    t->channel =
        arena_alloc(has_scales_of_step(s) ? p->amaxes : p->arena, sizeof(float) * (size_t)t->cols);
    s->down_folded =
        plan_shared_rows(p->m, BUFFER_down_folded, t->format, s->config->d_model, t->cols);
}

/* Plans a GEMM operand. In enum Buffer, the operand's transpose follows the operand. With FP8,
 * forward reads the rows; the copy that backward reads must be kept. */
static Tensor operand(Planner *p, bool is_own, Buffer b, Format f, int cols)
{
    if (!format_is_fp8(f))
        return place(p, is_own, b, f, cols);
    const size_t bytes = (size_t)p->rows * (size_t)cols;
    Tensor t = {
        .format = f, .rows = p->rows, .cols = cols, .fast = p->stream->recipe.fast != FAST_NONE
    };
    t.data = is_own && !p->transposes ? arena_alloc(p->arena, bytes) : plan_shared(p->m, b, bytes);
    t.scale = arena_alloc(p->arena, 16);
    if (p->transposes)
        t.data_t = is_own ? arena_alloc(p->arena, bytes) : plan_shared(p->m, b + 1, bytes);
    add_scale_amax(p, &t);
    return t;
}

static bool same(Tensor a, Format f)
{
    return format_equal(a.format, f);
}

/* The planner p for tensors between linear layers, which only have this rank's share of p's
 * rows. */
static Planner of_stream(const Planner *p)
{
    Planner own = *p;
    own.rows /= row_parts(p->stream);
    return own;
}

/* Whether the stream is kept. If so, its sum with a branch is written to another buffer, and
 * backward reads the old stream: as norm input, as GEMM operand, or to run the block again. NOTE:
 * without a backward pass there are two buffers, too: matmul may round its addend once more if it
 * adds in place, and an evaluation must give the same numbers as training. So the input of a
 * recomputed block is never in a buffer to which other blocks add in place. */
static bool stream_is_kept(const Planner *p)
{
    const Recipe *r = &p->stream->recipe;
    return keep_recomputes(p->keep) ||
           format_equal(p->stream->config->norm_after ? r->operand : r->saved_norm_input,
                        r->residual);
}

static Tensor place_stream(Planner *p)
{
    Stream *s = p->stream;
    const bool is_own = stream_is_kept(p) && (!s->forward_only || s->recipe.recompute);
    Planner own = of_stream(p);
    return place(&own, is_own, BUFFER_attn_res, s->recipe.residual, s->config->d_model);
}

/* Whether a gradient reads the inputs of these linear layers. */
static bool reads_input(const Planner *p, Linear l)
{
    return p->stream->trains_matrices ||
           adapter_projections(p->stream->config, p->layer, l).num_projections > 0;
}

/* Returns p with the number of rows of the MLP's buffers in blocks with this `keep`. If backward
 * does not recompute the MLP, forward must leave the rows of all tokens for backward. */
static Planner of_mlp(const Planner *p, Keep keep)
{
    Planner mlp = *p;
    mlp.rows = mlp_rows(p->stream, keep);
    return mlp;
}

static int experts_of(const Planner *p)
{
    return layer_experts(p->stream->config, p->layer);
}

/* The planner for gate, up, SwiGLU and the gradients of these tensors. */
static Planner of_hidden(const Planner *p, Keep keep)
{
    Planner hidden = *p;
    hidden.rows =
        hidden_rows(mlp_rows(p->stream, keep), experts_of(p), p->stream->config->experts.top_k);
    return hidden;
}

/* Places the arrays of a Routing of p's rows in one buffer. */
static Routing plan_routing(Planner *p, bool is_own)
{
    const Experts *e = &p->stream->config->experts;
    Routing r = { .tokens = p->rows, .experts = e->count, .top_k = e->top_k };
    const size_t assignments = (size_t)r.tokens * (size_t)r.top_k,
                 rows = (size_t)routing_rows(r.tokens, r.experts, r.top_k);
    int *at = bytes_of(p, is_own, BUFFER_routing,
                       sizeof *at * (3 * assignments + rows + (size_t)r.experts + 1));
    r.expert = at;
    r.row = r.expert + assignments;
    r.weight = (float *)(r.row + assignments);
    r.assignment = r.row + 2 * assignments;
    r.first = r.assignment + rows;
    return r;
}

static void plan_experts(Planner *p, Acts *a)
{
    const Stream *s = p->stream;
    const Recipe *r = &s->recipe;
    const int E = experts_of(p), C = s->config->d_model;
    const bool leaves = leaves_own(p);
    Planner hidden = of_hidden(p, p->keep);
    if (E == 0)
        return;
    a->router_logits = place(p, leaves, BUFFER_router_logits, (Format){ F32, 0, false }, E);
    a->experts = plan_routing(p, leaves);
    a->expert_x = operand(&hidden, false, BUFFER_expert_x, r->operand, C);
    a->expert_y = shared(&hidden, BUFFER_expert_y, r->residual, C);
    if (!s->forward_only)
        a->router_stats =
            bytes_of(p, leaves, BUFFER_router_stats,
                     sizeof(float) * (size_t)s->router.groups * (size_t)router_stats_width(E));
}

static void plan_stream(Planner *p, Acts *a)
{
    Stream *s = p->stream;
    Planner mlp = of_mlp(p, p->keep), own = of_stream(p), own_mlp = of_stream(&mlp);
    const Recipe *r = &s->recipe;
    int C = s->config->d_model;
    bool after = s->config->norm_after, leaves = leaves_own(p);
    bool keep_h = leaves && (after || p->keep == KEEP_ALL),
         one_h = p->keep == KEEP_INPUTS && !after && experts_of(p) == 0;

    a->attn_res = place_stream(p);
    bool alias_x = !after && format_equal(r->saved_norm_input, r->residual),
         alias_h = after && format_equal(r->operand, r->residual) && s->tensor_ranks == 1;
    a->mlp_res = !stream_is_kept(p) ? a->attn_res
                 : leaves           ? plan_own(&own, r->residual, C)
                                    : shared(&own, BUFFER_mlp_res, r->residual, C);
    a->attn_x = alias_x ? a->attn_res : place(&own, leaves, BUFFER_attn_x, r->saved_norm_input, C);
    a->mlp_x = alias_x ? a->mlp_res : place(&own_mlp, leaves, BUFFER_mlp_x, r->saved_norm_input, C);
    a->attn_h =
        alias_h ? a->attn_res
                : operand(p, keep_h && reads_input(p, LINEAR_QKV), BUFFER_attn_h, r->operand, C);
    a->mlp_h = experts_of(p) > 0 ? place(&mlp, keep_h, BUFFER_mlp_h, r->residual, C)
               : alias_h         ? a->mlp_res
               : one_h           ? a->attn_h
                       : operand(&mlp, keep_h && reads_input(p, LINEAR_GATE_UP), BUFFER_mlp_h,
                                 r->operand, C);
    if (one_h && format_is_fp8(r->operand)) {
        /* backward uses the scale of forward again */
        a->mlp_h.scale = arena_alloc(p->arena, 16);
        add_scale_amax(p, &a->mlp_h);
    }
    if (after) {
        a->attn_branch = same(a->attn_x, r->residual)
                             ? a->attn_x
                             : shared(&own, BUFFER_attn_branch, r->residual, C);
        a->mlp_branch = same(a->mlp_x, r->residual) ? a->mlp_x : a->attn_branch;
    }
}

/* The attention output as GEMM operand. If it is saved as an operand, these are the saved codes,
 * and all blocks share the buffer of the transpose. */
static Tensor att_operand(Planner *p, Tensor att, Format f)
{
    if (!format_equal(att.format, f))
        return operand(p, false, BUFFER_attn_operand, f, att.cols);
    att.fast = p->stream->recipe.fast != FAST_NONE;
    att.data_t = p->transposes ? plan_shared(p->m, BUFFER_attn_operand_T, tensor_numel(att)) : NULL;
    return att;
}

static void plan_acts(Planner *p, Acts *a)
{
    Stream *s = p->stream;
    const Recipe *r = &s->recipe;
    const ModelConfig *c = s->config;
    int HD = c->n_heads * c->head_dim, S = HD + 2 * c->n_kv_heads * c->head_dim,
        F = layer_mlp_width(c, p->layer);
    bool leaves = leaves_own(p), changed = c->qk_norm || c->clip_qkv > 0;
    Planner mlp = of_mlp(p, p->keep), own = of_stream(p), own_mlp = of_stream(&mlp),
            hidden = of_hidden(p, p->keep);
    bool leaves_attention = leaves || (p->keep == KEEP_ATTENTION && !s->forward_only);

    a->keep = p->keep;
    plan_stream(p, a);
    a->qkv_saved = place(p, leaves, BUFFER_qkv_saved, r->saved_qkv, S);
    a->qkv_raw =
        same(a->qkv_saved, r->residual) ? a->qkv_saved : shared(p, BUFFER_qkv_raw, r->residual, S);
    a->qkv_rotated = !same(a->qkv_saved, r->residual) ? a->qkv_raw
                     : changed ? shared(p, BUFFER_qkv_rotated, r->residual, S)
                               : a->qkv_saved;
    a->attn_saved = place(p, leaves_attention, BUFFER_attn_saved, r->saved_attention, HD);
    add_scale_amax(p, &a->attn_saved);
    a->attn_out = same(a->attn_saved, r->residual) ? a->attn_saved
                                                   : shared(p, BUFFER_attn_out, r->residual, HD);
    a->attn_operand =
        same(a->attn_out, r->operand) ? a->attn_out : att_operand(p, a->attn_saved, r->operand);
    plan_experts(p, a);
    a->gate_up_saved = place(&hidden, leaves, BUFFER_gate_up_saved, r->saved_mlp, 2 * F);
    a->gate_up_raw = same(a->gate_up_saved, r->residual)
                         ? a->gate_up_saved
                         : shared(&hidden, BUFFER_gate_up_raw, r->residual, 2 * F);
    const bool keeps_act = p->keep == KEEP_ALL && !s->forward_only && reads_input(p, LINEAR_DOWN);
    a->swiglu_operand = operand(&hidden, keeps_act, BUFFER_swiglu_operand, r->operand, F);
    add_channels(p, &a->swiglu_operand);

    a->attn_stats = floats(&own, leaves, BUFFER_attn_stats, 2);
    a->mlp_stats = floats(&own_mlp, leaves, BUFFER_mlp_stats, 2);
    a->qk_stats = !c->qk_norm ? NULL
                              : floats(p, leaves, BUFFER_qk_stats,
                                       c->qk_norm == QK_NORM_HEAD ? c->n_heads + c->n_kv_heads : 2);
    a->lse = floats(p, leaves_attention, BUFFER_lse, c->n_heads);
    a->own_lse = context_skips(s) ? floats(p, leaves_attention, BUFFER_own_lse, c->n_heads) : NULL;
    for (Linear l = 0; l < NUM_LINEARS; l++) {
        const int projections = adapter_projections(c, p->layer, l).num_projections;
        Planner *of = l < LINEAR_GATE_UP ? p : &hidden;
        a->tensor[ACT_xa_qkv + (int)l] =
            projections
                ? place(of, leaves, BUFFER_xa_qkv + 2 * l, r->residual, projections * c->lora.rank)
                : (Tensor){ 0 };
    }
}

/* Plans a gradient dy that is a GEMM operand. In FP8, the GEMM of the input's gradient reads dy's
 * rows, and the GEMM of the weight's gradient reads dy's transpose, unless the weight is an
 * adapter. All blocks share dy; plan_gradients adds each block's scale_amax. */
static Tensor gradient_operand(Planner *p, Buffer b, int cols)
{
    Tensor t = operand(p, false, b, p->stream->recipe.gradient, cols);
    t.scale_amax = NULL;
    t.scale_reused = NULL;
    t.fast = p->stream->recipe.fast == FAST_ALL;
    return t;
}

/* The rows of dgate_up overwrite the saved gate and up if both have the same size: FP8 and FP8, or
 * the same format. Otherwise all blocks share the rows. Blocks also share the rows if scales are
 * valid for a step: then a gradient beyond its range is computed again from gate and up. */
static Tensor plan_dgate_up(Planner *p, int cols)
{
    const Format saved = p->stream->recipe.saved_mlp, f = p->stream->recipe.gradient;
    Tensor t = {
        .format = f, .rows = p->rows, .cols = cols, .fast = p->stream->recipe.fast == FAST_ALL
    };
    if (format_is_fp8(f) ? has_scales_of_step(p->stream) || !format_is_fp8(saved)
                         : !format_equal(saved, f))
        return gradient_operand(p, BUFFER_dgate_up, cols);
    if (format_is_fp8(f)) {
        t.scale = arena_alloc(p->arena, 16);
        t.data_t = p->transposes ? plan_shared(p->m, BUFFER_dgate_up_T, tensor_numel(t)) : NULL;
    }
    return t;
}

/* Plans the gradients of every block. Each block has its own scale_amax, the same in all sets,
 * because the backward passes of all sets run in one order. If dgate_up overwrites the saved gate
 * and up, its rows are in the block's own memory. */
static void plan_gradients(Planner *p, Tensor dqkv_op)
{
    const Recipe *r = &p->stream->recipe;
    const ModelConfig *c = p->stream->config;
    Tensor kind[2] = { 0 }; /* dgate_up of blocks with one MLP, and of blocks with experts */
    for (int l = 0; l < p->stream->L; l++) {
        p->layer = l;
        const int F = layer_mlp_width(c, l);
        Planner hidden = of_hidden(p, r->keep);
        Tensor *dgate_up = &kind[experts_of(p) > 0];
        if (dgate_up->rows == 0)
            *dgate_up = plan_dgate_up(&hidden, 2 * F);
        add_scale_amax(p, dgate_up);
        add_scale_amax(p, &dqkv_op);
        for (int set = 0; set < p->m->num_sets; set++) {
            Acts *a = stream_acts(p->stream, set, l);
            a->dact = shared(&hidden, BUFFER_dact, r->residual, F);
            a->dgate_up = *dgate_up;
            a->dqkv_op = dqkv_op;
            if (!dgate_up->data)
                a->dgate_up.data = a->gate_up_saved.data;
        }
    }
}

/* Work memory of attention on a GPU: in backward, per row and head, sums of dq in F32, dk and dv in
 * BF16 where heads share keys, and four more floats. Sizes are padded to tiles of 128 rows and 64
 * columns. The last tiles of documents are padded too: an eighth is added for them. If this memory
 * is missing or too small, attention allocates its own. */
static void plan_scratch(Model *m, Stream *s)
{
    const Attention a = context_attention(s, s->attn);
    const size_t tokens = (size_t)a.B * (size_t)((a.T + 127) / 128 * 128),
                 rows = tokens + (s->documents ? tokens / 8 : 0);
    const size_t floats = (size_t)((a.D + 63) / 64 * 64) + (size_t)(a.K < a.H ? a.D : 0) + 4;
    s->attn.scratch_bytes = rows * (size_t)a.H * floats * sizeof(float) + (64 << 10);
    s->attn.scratch = plan_shared(m, BUFFER_attention, s->attn.scratch_bytes);
}

/* Plans the gradients of experts and, for the router, what lasts longer than a block. */
static void plan_expert_work(Planner *p)
{
    Stream *s = p->stream;
    const int E = s->config->experts.count, C = s->config->d_model;
    const Format f32 = { F32, 0, false };
    BackwardScratch *t = &s->work;
    if (E == 0)
        return;
    for (p->layer = 0; experts_of(p) == 0;)
        p->layer++;
    Planner hidden = of_hidden(p, s->recipe.keep);
    if (s->config->lora.rank > 0)
        shared(&hidden, BUFFER_dxa, s->recipe.residual, 2 * s->config->lora.rank);
    t->drouter = shared(p, BUFFER_drouter, s->recipe.residual, E);
    t->dweight = shared(&hidden, BUFFER_dweight, f32, 1);
    t->expert_dy = gradient_operand(&hidden, BUFFER_expert_dy, C);
    t->expert_dx = shared(&hidden, BUFFER_expert_dx, s->recipe.residual, C);
    s->router.sums = tensor_alloc(p->arena, f32, s->L + 1, router_stats_width(E) + 1);
    s->router.pooled = tensor_alloc(p->arena, f32, 1, router_stats_width(E));
}

static void plan_work(Planner *p)
{
    Stream *s = p->stream;
    const Recipe *r = &s->recipe;
    const ModelConfig *c = s->config;
    BackwardScratch *t = &s->work;
    Planner own = of_stream(p);
    const bool alone = s->tensor_ranks == 1;
    int C = c->d_model, HD = c->n_heads * c->head_dim, S = HD + 2 * c->n_kv_heads * c->head_dim;

    t->dres = shared(&own, BUFFER_dres, r->residual, C);
    t->dres_amax = alone && !c->norm_after && format_is_fp8(r->gradient)
                       ? arena_alloc(p->arena, sizeof(float))
                       : NULL;
    t->dy = alone && !c->norm_after && same(t->dres, r->gradient)
                ? t->dres
                : gradient_operand(p, BUFFER_dy, C);
    t->dh = shared(p, BUFFER_dh, r->residual, C);
    t->datt = shared(p, BUFFER_datt, r->residual, HD);
    t->dqkv = shared(p, BUFFER_dqkv, r->residual, S);
    plan_gradients(p,
                   same(t->dqkv, r->gradient) ? t->dqkv : gradient_operand(p, BUFFER_dqkv_op, S));
    if (r->residual.dtype == BF16)
        plan_scratch(p->m, s);
    t->dxa = c->lora.rank
                 ? shared(p, BUFFER_dxa, r->residual, (LORA_PROJECTIONS + !alone) * c->lora.rank)
                 : (Tensor){ 0 };
}

/* Returns the first block of this stage in which forward saves the same tensors as in block l. */
static int first_like(const Planner *p, int l)
{
    const Recipe *r = &p->stream->recipe;
    const ModelConfig *c = p->stream->config;
    const UnitKind *k = unit_kind(c, unit_of_layer(c, l));
    int first = 0;
    while (recipe_keep(r, first) != recipe_keep(r, l) ||
           !store_holds(p->store, unit_of_layer(c, first)) ||
           unit_kind(c, unit_of_layer(c, first)) != k ||
           layer_experts(c, first) != layer_experts(c, l))
        first++;
    return first;
}

/* Chooses block l's own memory: the next free range of the arena, or a slot that it uses in turn
 * with other blocks. */
static void plan_own_memory(Planner *p, int l)
{
    const Offload *o = &p->m->offload;
    Acts *a = &p->m->acts[l];
    Arena *all = p->arena, slot = { all->memory, o->at + (size_t)a->slot * o->bytes };
    if (o->slots < o->saves)
        p->arena = &slot;
    p->arena->used = whole_256(p->arena->used);
    const size_t before = p->arena->used;
    plan_acts(p, a);
    a->own_bytes = whole_256(p->arena->used - before);
    p->arena = all;
}

/* Without a backward pass, all blocks that add to the stream in the same way share the memory of
 * the first of these blocks. */
void plan_block(Planner *p, Model *m, int unit)
{
    const int l = unit - unit_of_layer(m->text.config, 0), first = first_like(p, l);
    p->layer = l;
    p->keep = recipe_keep(&m->text.recipe, l);
    if (l == first || !m->text.forward_only)
        plan_own_memory(p, l);
    else
        m->acts[l] = m->acts[first];
}

void plan_head_input(Planner *p, Model *m, int unit)
{
    p->keep = m->text.recipe.keep;
    m->unit_acts[unit].attn_res = place_stream(p);
}

/* Plans the slots if there are fewer slots than saves (offload.h). Each slot is large enough for
 * any block. The sizes of blocks come from the previous plan. */
static void plan_slots(Arena *arena, Model *m)
{
    Offload *o = &m->offload;
    o->bytes = 0;
    for (int l = 0; l < m->text.L; l++)
        o->bytes = m->acts[l].own_bytes > o->bytes ? m->acts[l].own_bytes : o->bytes;
    o->at = whole_256(arena->used);
    if (o->slots < o->saves)
        arena->used = o->at + (size_t)o->slots * o->bytes;
}

/* If the next block is on another stage, plans the output of a chunk's last block in the same way
 * as that stage plans its input. */
static void plan_output(Planner *p, int u)
{
    p->keep = recipe_keep(&p->stream->recipe, u - unit_of_layer(p->stream->config, 0));
    p->m->unit_acts[u].attn_res = place_stream(p);
}

/* The number of sets in which unit u has buffers: the number of micro-batches in flight in its
 * chunk or, if the unit reads the output of the previous chunk, in that chunk. */
static int sets_of(const Model *m, const ParamStore *store, int u)
{
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++) {
        const UnitRange units = pipeline_units(&store->pipe, m->text.config, chunk);
        if (u >= units.first && u <= units.end)
            return m->text.forward_only ? 1 : pipeline_in_flight(&store->pipe, chunk);
    }
    return 0;
}

static void plan_unit(Planner *p, int u)
{
    Model *m = p->m;
    Arena *const amaxes = p->amaxes;
    const size_t at = m->amax_at[u] = amaxes->used;
    for (int set = 0; set < sets_of(m, p->store, u); set++) {
        Arena own = { .memory = (char *)amaxes->memory + (size_t)set * m->amax_bytes, .used = at };
        p->amaxes = &own;
        stages_use_set(m, set);
        if (!store_holds(p->store, u))
            plan_output(p, u);
        else if (p->store->shape[u].kind->plan)
            p->store->shape[u].kind->plan(p, m, u);
        amaxes->used = own.used;
    }
    p->amaxes = amaxes;
    m->amax_at[u + 1] = amaxes->used;
    stages_use_set(m, 0);
}

static void plan_outgoing(Planner *p)
{
    Stream *s = p->stream;
    Planner own = of_stream(p);
    for (Neighbour n = 0; n < NUM_NEIGHBOURS && p->store->pipe.stages > 1; n++) {
        p->m->outgoing[n].stream = plan_own(&own, s->recipe.residual, s->config->d_model);
        p->m->outgoing[n].amax = tensor_alloc(p->arena, (Format){ F32, 0, false }, 1, 1);
    }
}

void plan_units(Arena *arena, Arena *amaxes, Model *m, const ParamStore *store)
{
    Planner planner = { arena,       amaxes,
                        m,           &m->text,
                        store,       m->text.trains_matrices,
                        0,           m->text.recipe.keep,
                        m->text.rows },
            *p = &planner;
    const int last = p->store->num_units - 1;
    const size_t before = p->arena->used;
    offload_plan_slots(m, store);
    plan_slots(p->arena, m);
    for (int u = 0; u < last; u++)
        plan_unit(p, u);
    m->bytes.blocks = m->text.forward_only ? 0 : p->arena->used - before;
    plan_unit(p, last);
    plan_outgoing(p);
    if (m->text.config->experts.bias_gamma > 0)
        m->text.router.bias = tensor_alloc(p->arena, (Format){ F32, 0, false }, m->text.L,
                                           m->text.config->experts.count);
    if (!m->text.forward_only) {
        plan_work(p);
        plan_expert_work(p);
    }
}
