/* recipe + config -> every Tensor placed in the arena. The same function runs twice: to measure, then to place. */
#include "model/plan.h"

#include <math.h>

#include "kernels/error.h"

/* Tokens of a prompt that go through the model at once: so many that GEMMs are busy, so few that their buffers are small. */
enum { PREFILL_TOKENS = 512 };

/* One block's activations. `first`: those of block 0, whose memory the others share where a tensor is not their own. `transposes`:
 * of FP8 operands backward reads the transposes, for gradients of the blocks' matrices; else the rows, for those of adapters.
 * `ranges`: FP8 operands have theirs, from which later micro-batches of a step get scales. */
typedef struct { Arena *arena; const Acts *first; int N; bool transposes, ranges; } Planner;

/* Where there are steps, and scales hold for them. */
static bool has_ranges(const Model *m)
{
    return m->recipe.scales == OF_STEP && !m->forward_only;
}

static Tensor own(Planner *p, Format f, int cols)
{
    return tensor_alloc(p->arena, f, p->N, cols);
}

static Tensor shared(Planner *p, Tensor of_first, Format f, int cols)
{
    return p->first ? of_first : own(p, f, cols);
}

static Tensor place(Planner *p, bool is_own, Tensor of_first, Format f, int cols)
{
    return is_own ? own(p, f, cols) : shared(p, of_first, f, cols);
}

static void add_range(const Planner *p, Tensor *t)
{
    if (p->ranges && format_is_fp8(t->format) && !t->format.group)
        t->range = arena_alloc(p->arena, sizeof(float));
}

/* A GEMM operand. In FP8 forward reads its rows; what backward reads of it has to be kept. */
static Tensor operand(Planner *p, bool is_own, Tensor of_first, Format f, int cols)
{
    if (!format_is_fp8(f))
        return place(p, is_own, of_first, f, cols);
    Tensor t = place(p, is_own && !p->transposes, of_first, f, cols);
    t.scale = arena_alloc(p->arena, 16);
    if (p->transposes)
        t.data_t = is_own || !p->first ? arena_alloc(p->arena, tensor_numel(t)) : of_first.data_t;
    add_range(p, &t);
    return t;
}

static bool same(Tensor a, Format f)
{
    return format_equal(a.format, f);
}

/* The stream is kept where backward reads it: as norm input, as GEMM operand, or to run the block again. */
static bool stream_is_kept(const Model *m)
{
    const Recipe *r = &m->recipe;
    if (m->forward_only)
        return false;
    return r->keep == KEEP_BLOCK || format_equal(m->config->norm_after ? r->operand : r->saved, r->stream);
}

/* Whether a gradient reads the inputs of these layers. */
static bool reads_input(const Model *m, Linear l)
{
    return m->trains_matrices || adapter_parts(m->config, l).num_parts > 0;
}

static void plan_stream(Planner *p, const Model *m, Acts *a)
{
    const Recipe *r = &m->recipe;
    const Acts none = { 0 }, *s = p->first ? p->first : &none;
    int C = m->config->d_model;
    bool after = m->config->norm_after, block = r->keep == KEEP_BLOCK;
    bool keep_h = !block && (after || r->keep == KEEP_ALL);

    a->res0 = place(p, stream_is_kept(m), s->res0, r->stream, C);
    a->res1 = !stream_is_kept(m) ? a->res0 : place(p, !block, s->res1, r->stream, C);
    bool alias_x = !after && format_equal(r->saved, r->stream);
    a->x0 = alias_x ? a->res0 : place(p, !block, s->x0, r->saved, C);
    a->x1 = alias_x ? a->res1 : place(p, !block, s->x1, r->saved, C);
    bool alias_h = after && format_equal(r->operand, r->stream);
    a->h0 = alias_h ? a->res0 : operand(p, keep_h && reads_input(m, LINEAR_QKV), s->h0, r->operand, C);
    a->h1 = alias_h ? a->res1 : r->keep == KEEP_INPUTS && !after ? a->h0
          : operand(p, keep_h && reads_input(m, LINEAR_GATE_UP), s->h1, r->operand, C);
    if (a->h1.data == a->h0.data && format_is_fp8(r->operand)) {
        a->h1.scale = arena_alloc(p->arena, 16);       /* forward's scale is used again in backward */
        add_range(p, &a->h1);
    }
    if (after) {
        a->branch0 = same(a->x0, r->stream) ? a->x0 : shared(p, s->branch0, r->stream, C);
        a->branch1 = same(a->x1, r->stream) ? a->x1 : a->branch0;
    }
}

/* The attention output as GEMM operand: if it is saved as one, the saved codes, to which all blocks share the transpose. */
static Tensor att_operand(Planner *p, Tensor att, Tensor of_first, Format f)
{
    if (!format_equal(att.format, f))
        return operand(p, false, of_first, f, att.cols);
    att.data_t = !p->transposes ? NULL : p->first ? of_first.data_t : arena_alloc(p->arena, tensor_numel(att));
    return att;
}

static void plan_acts(Planner *p, const Model *m, Acts *a)
{
    const Recipe *r = &m->recipe;
    const ModelConfig *c = m->config;
    const Acts none = { 0 }, *s = p->first ? p->first : &none;
    int HD = c->n_heads * c->head_dim, S = HD + 2 * c->n_kv_heads * c->head_dim, F = c->mlp_width;
    bool block = r->keep == KEEP_BLOCK, changed = c->qk_norm || c->clip_qkv > 0;

    plan_stream(p, m, a);
    a->qkv = place(p, !block, s->qkv, r->qkv, S);
    a->proj = same(a->qkv, r->stream) ? a->qkv : shared(p, s->proj, r->stream, S);
    a->rot = !same(a->qkv, r->stream) ? a->proj : changed ? shared(p, s->rot, r->stream, S) : a->qkv;
    a->att = place(p, !block, s->att, r->att, HD);
    add_range(p, &a->att);
    a->mix = same(a->att, r->stream) ? a->att : shared(p, s->mix, r->stream, HD);
    a->att_op = same(a->mix, r->operand) ? a->mix : att_operand(p, a->att, s->att_op, r->operand);
    a->gate_up = place(p, !block, s->gate_up, r->hidden, 2 * F);
    a->wide = same(a->gate_up, r->stream) ? a->gate_up : shared(p, s->wide, r->stream, 2 * F);
    a->act = operand(p, r->keep == KEEP_ALL && reads_input(m, LINEAR_DOWN), s->act, r->operand, F);

    a->stats0 = arena_alloc(p->arena, 2 * sizeof(float) * p->N);
    a->stats1 = arena_alloc(p->arena, 2 * sizeof(float) * p->N);
    const int norms = c->qk_norm == QK_NORM_HEAD ? c->n_heads + c->n_kv_heads : 2;
    a->qk_stats = c->qk_norm ? arena_alloc(p->arena, norms * sizeof(float) * p->N) : NULL;
    a->lse = arena_alloc(p->arena, sizeof(float) * p->N * c->n_heads);
    for (Linear l = 0; l < NUM_LINEARS; l++) {
        const int parts = adapter_parts(c, l).num_parts;
        a->low[l] = parts ? place(p, !block && !m->forward_only, s->low[l], r->stream, parts * c->lora.rank) : (Tensor){ 0 };
    }
}

static Tensor gradient_operand(Arena *arena, const Model *m, int rows, int cols)
{
    return m->trains_matrices ? operand_alloc(arena, m->recipe.gradient, rows, cols)
                              : tensor_alloc(arena, m->recipe.gradient, rows, cols);
}

/* With gate and up saved in FP8, what the GEMM wrote is not needed in backward: its memory holds the gradient's codes. */
static Tensor plan_dgate_up(Arena *arena, const Model *m, int rows, int cols)
{
    Format f = m->recipe.gradient;
    Tensor wide = m->acts[0].wide, t = { .format = f, .rows = rows, .cols = cols };
    if (wide.data == m->acts[0].gate_up.data || !format_is_fp8(f))
        return gradient_operand(arena, m, rows, cols);
    t.data = wide.data;
    t.data_t = m->trains_matrices ? (char *)wide.data + tensor_numel(t) : NULL;
    t.scale = arena_alloc(arena, 16);
    return t;
}

/* All blocks have these, each with a range of its own. */
static void plan_gradients(Arena *arena, Model *m, Tensor dgate_up, Tensor dqkv_op)
{
    const Planner p = { .arena = arena, .ranges = has_ranges(m) };
    for (int l = 0; l < m->L; l++) {
        m->acts[l].dgate_up = dgate_up;
        m->acts[l].dqkv_op = dqkv_op;
        add_range(&p, &m->acts[l].dgate_up);
        add_range(&p, &m->acts[l].dqkv_op);
    }
}

static void plan_work(Arena *arena, Model *m)
{
    const Recipe *r = &m->recipe;
    const ModelConfig *c = m->config;
    Work *t = &m->work;
    int N = m->N, C = c->d_model, HD = c->n_heads * c->head_dim, S = HD + 2 * c->n_kv_heads * c->head_dim, F = c->mlp_width;

    t->dres = tensor_alloc(arena, r->stream, N, C);
    t->dres_amax = !c->norm_after && format_is_fp8(r->gradient) ? arena_alloc(arena, sizeof(float)) : NULL;
    t->dy = !c->norm_after && same(t->dres, r->gradient) ? t->dres : gradient_operand(arena, m, N, C);
    /* these pairs are never alive together: the MLP's backward is over before attention's begins, dh comes last in both */
    Tensor narrow = tensor_alloc(arena, r->stream, N, C > HD ? C : HD), wide = tensor_alloc(arena, r->stream, N, S > F ? S : F);
    t->dh = tensor_at(narrow.data, r->stream, N, C);
    t->datt = tensor_at(narrow.data, r->stream, N, HD);
    t->dact = tensor_at(wide.data, r->stream, N, F);
    t->dqkv = tensor_at(wide.data, r->stream, N, S);
    plan_gradients(arena, m, plan_dgate_up(arena, m, N, 2 * F),
                   same(t->dqkv, r->gradient) ? t->dqkv : gradient_operand(arena, m, N, S));
    t->dlow = c->lora.rank ? tensor_alloc(arena, r->stream, N, LOW_RANK_PARTS * c->lora.rank) : (Tensor){ 0 };
}

/* Logits of this many tokens exist at once: chunks of at most 512 MiB, as equal as can be, at least one token. */
static int loss_chunk(const Config *c, int N)
{
    if (c->loss_chunk > 0)
        return c->loss_chunk < N ? c->loss_chunk : N;
    size_t row = (size_t)c->model.embedding_size * dtype_size(c->recipe.stream.dtype);
    int count = (int)((row * N + (512u << 20) - 1) / (512u << 20)), rows = (N + count - 1) / count;
    if (format_is_fp8(c->recipe.head))          /* GPUs add FP8 products by sixteens */
        rows = (rows + 15) / 16 * 16;
    return rows < N ? rows : N;
}

/* The rotary tables that blocks need, and what is each block's own of its attention. */
static void plan_attention(Arena *arena, Model *m)
{
    const ModelConfig *c = m->config;
    const size_t bytes = sizeof(float) * (size_t)m->P * (size_t)m->attn.D;
    bool needed[2] = { false, false };
    for (int l = 0; l < m->L; l++)
        needed[layer_is_scaled(c, l)] = true;
    for (int i = 0; i < 2; i++)
        m->rope[i] = needed[i] ? arena_alloc(arena, bytes) : NULL;
    for (int l = 0; l < m->L; l++) {
        m->acts[l].attn = m->attn;
        m->acts[l].attn.rope = m->rope[layer_is_scaled(c, l)];
        m->acts[l].attn.window = layer_slides(c, l) ? c->sliding_window : 0;
    }
}

/* FP8 operands of the head's backward; the gradient's transpose has no more bytes than the logits. */
static void plan_head_operands(Arena *arena, Model *m)
{
    const Format e4m3 = { E4M3, 0, false };
    const int chunk = m->logits.rows, V = m->logits.cols, C = m->config->d_model;
    m->dlogits = tensor_alloc(arena, m->recipe.head, chunk, V);
    m->dlogits.data_t = m->logits.data;
    m->head_h = operand_alloc(arena, e4m3, chunk, C);
    m->head_w = tensor_alloc(arena, e4m3, V, C);
    m->head_w.data_t = m->head_w.data;
    m->head_w.data = NULL;
}

static void plan_head(Arena *arena, Model *m, const Config *c)
{
    int N = m->N;
    m->final_stats = arena_alloc(arena, 2 * sizeof(float) * N);
    m->final_h = tensor_alloc(arena, m->recipe.stream, N, c->model.d_model);
    m->logits = tensor_alloc(arena, m->recipe.stream, loss_chunk(c, N), c->model.embedding_size);
    if (format_is_fp8(m->recipe.head) && !m->forward_only)
        plan_head_operands(arena, m);
    m->targets = arena_alloc(arena, sizeof(int) * N);
    m->sorted = arena_alloc(arena, sizeof *m->sorted * N);
    m->doc_start = arena_alloc(arena, sizeof(int) * (N + 1));
    m->losses = arena_alloc(arena, 2 * sizeof(float) * N);
    m->sums = arena_alloc(arena, 2 * sizeof(float));
}

/* Without a backward pass all blocks have the memory of the first. */
static void plan_blocks(Arena *arena, Model *m)
{
    for (int l = 0; l < m->L; l++) {
        size_t before = arena->used;
        if (l == 0 || !m->forward_only)
            plan_acts(&(Planner){ arena, l ? &m->acts[0] : NULL, m->N, m->trains_matrices, has_ranges(m) }, m, &m->acts[l]);
        else
            m->acts[l] = m->acts[0];
        m->bytes.block = m->forward_only ? 0 : arena->used - before;       /* in the end the last block's: all that is its own,
                                                                              nothing shared */
    }
}

static void plan_caches(Arena *arena, Model *m)
{
    const int width = m->attn.K * m->attn.D;
    for (int l = 0; l < m->L; l++)
        m->acts[l].cache = (KvCache){ .k = tensor_alloc(arena, m->recipe.stream, m->P, width),
                                      .v = tensor_alloc(arena, m->recipe.stream, m->P, width) };
}

static bool trains_matrices(const Fsdp *f)
{
    for (int u = 0; u < f->num_units; u++)
        for (int i = 0; i < f->shape[u].num_params; i++)
            if (f->shape[u].param[i].is_operand && f->shape[u].param[i].region == TRAINED)
                return true;
    return false;
}

static void plan_all(Arena *arena, Model *m, Fsdp *f, const Config *c, Placement p)
{
    PlanBytes *b = &m->bytes;
    arena->used = 0;
    fsdp_plan(f, arena, c, p);
    m->trains_matrices = trains_matrices(f);
    b->units = arena->used;
    plan_blocks(arena, m);
    m->acts[m->L].res0 = stream_is_kept(m) ? tensor_alloc(arena, m->recipe.stream, m->N, c->model.d_model)
                                           : m->acts[0].res0;
    if (!m->forward_only)
        plan_work(arena, m);
    b->work = arena->used - b->units - m->L * b->block;
    plan_head(arena, m, c);
    plan_attention(arena, m);
    b->head = arena->used - b->units - m->L * b->block - b->work;
    if (c->generate)
        plan_caches(arena, m);
    b->cache = arena->used - b->units - m->L * b->block - b->work - b->head;
    b->total = arena->used;
}

int decode_rows(const Recipe *r, int count)
{
    enum { MULTIPLE = 16 };
    return format_is_fp8(r->operand) ? (count + MULTIPLE - 1) / MULTIPLE * MULTIPLE : count;
}

size_t model_planned_bytes(const Model *m, const Fsdp *f)
{
    return m->bytes.total + f->gathered.used;
}

void model_plan(Model *m, Fsdp *f, const Config *c, Placement p)
{
    const ModelConfig *mc = &c->model;
    const int P = mc->max_sequence_length + (c->generate ? decode_rows(&c->recipe, 1) - 1 : 0);
    const int T = !c->generate ? P : P > PREFILL_TOKENS ? PREFILL_TOKENS : decode_rows(&c->recipe, P);
    *m = (Model){ .config = mc, .recipe = c->recipe, .L = mc->n_layers, .P = P, .forward_only = config_forward_only(c),
                  .documents = c->data.generate_doc_lengths && !c->generate, .lora_scale = (float)lora_scale(&mc->lora) };
    *f = (Fsdp){ 0 };
    m->attn = (Attention){ .B = c->device_train_microbatch_size, .T = T, .H = mc->n_heads,
                           .K = mc->n_kv_heads, .D = mc->head_dim, .scale = (float)(1 / sqrt(mc->head_dim)),
                           .clip = mc->clip_qkv, .norm = mc->norm };
    m->N = m->attn.B * m->attn.T;
    m->acts = xcalloc(m->L + 1, sizeof *m->acts);
    m->host_doc_start = xmalloc(sizeof(int) * (m->N + 1));
    m->host_sorted = xmalloc(sizeof *m->host_sorted * m->N);
    plan_all(&(Arena){ 0 }, m, f, c, p);
}

void model_place_tensors(Model *m, Fsdp *f, const Config *c)
{
    plan_all(&(Arena){ .base = m->memory }, m, f, c, (Placement){ f->shards, f->rank, f->sum_once });
}
