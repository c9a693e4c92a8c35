/* Plans the memory of a whole model: shards, units, head and caches, one after the other in one
 * arena. */
#include "model/plan_model.h"

#include <math.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/parallel/context.h"
#include "model/lifetimes.h"
#include "model/block/projector.h"
#include "model/plan/plan.h"
#include "model/plan/plan_head.h"
#include "model/plan/plan_ranks.h"
#include "model/store/param_store_sizes.h"
#include "model/update/muon_step.h"
#include "model/store/offload.h"
#include "model/parallel/stages.h"
#include "model/parallel/tensor_ranks.h"
#include "model/shape/units.h"

/* Number of prompt tokens that go through the model at once: enough for efficient GEMMs, few enough
 * for small buffers. */
enum { PREFILL_TOKENS = 512 };

/* Sets the rotary tables that a stream's blocks need, and the attention settings of each block. */
static void plan_attention(Arena *arena, Stream *s, int sets)
{
    const ModelConfig *c = s->config;
    const size_t bytes = sizeof(float) * (size_t)s->P * (size_t)s->attn.D;
    bool needed[NUM_ROTATIONS] = { false };
    for (int l = 0; l < s->L; l++)
        needed[layer_rotation(c, l)] = true;
    for (int i = 0; i < NUM_ROTATIONS; i++)
        s->rope[i] = needed[i] ? arena_alloc(arena, bytes) : NULL;
    for (int i = 0; i < sets * s->L; i++) {
        const int l = i % s->L;
        Acts *a = stream_acts(s, i / s->L, l);
        a->layer = l;
        a->attn = s->attn;
        a->attn.rope = s->rope[layer_rotation(c, l)] +
                       (size_t)s->context_rank * (size_t)s->attn.T * (size_t)s->attn.D;
        a->attn.window = layer_slides(c, l) ? c->sliding_window : 0;
        a->heads = context_attention(s, a->attn);
    }
}

/* Plans the caches of this stage's blocks. */
static void plan_caches(Arena *arena, Model *m, const ParamStore *store)
{
    const int width = m->text.attn.K * m->text.attn.D;
    for (int l = 0; l < m->text.L; l++)
        if (store_holds(store, unit_of_layer(m->text.config, l)))
            m->acts[l].cache =
                (KvCache){ .k = tensor_alloc(arena, m->text.recipe.residual, m->text.P, width),
                           .v = tensor_alloc(arena, m->text.recipe.residual, m->text.P, width) };
}

static bool trains_matrices(const ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++)
            if (store->shape[u].param[i].is_operand && store->shape[u].param[i].region == TRAINED)
                return true;
    return false;
}

static void plan_all(Arena *arena, Model *m, ParamStore *store, const Config *c, ShardChoice p)
{
    PlanBytes *b = &m->bytes;
    arena->used = 0;
    store_plan(store, arena, c, p);
    m->text.trains_matrices = trains_matrices(store);
    m->has_head = store_holds(store, store->num_units - 1);
    b->units = arena->used;
    m->offload.saves = m->text.forward_only ? 0 : offload_saves(m, store);
    m->offload.slots = p.slots > 0 && p.slots < m->offload.saves ? p.slots : m->offload.saves;
    store->update_bucket_bytes = store_update_bucket_bytes(store);
    const size_t buckets = UPDATE_BUFFERS * store->update_bucket_bytes,
                 matrices = muon_bytes(store, c), tied = stages_tied_bytes(store);
    const size_t update = buckets > matrices ? buckets : matrices,
                 staging = update > tied ? update : tied;
    store->staging_bytes = m->shared_bytes > staging ? m->shared_bytes : staging;
    store->staging = m->shared_memory = arena_alloc(arena, store->staging_bytes);
    m->amaxes = arena_alloc(arena, (size_t)m->num_sets * m->amax_bytes);
    Arena amaxes = { .memory = (char *)m->amaxes };
    plan_units(arena, &amaxes, m, store);
    plan_ranks_context(m);
    plan_ranks_tensor(m);
    offload_plan(m, store);
    m->amax_bytes = amaxes.used;
    b->work = arena->used - b->units - b->blocks;
    projector_plan_rows(arena, m);
    plan_head(arena, m, c);
    plan_attention(arena, &m->text, m->num_sets);
    b->head = arena->used - b->units - b->blocks - b->work;
    if (c->generate)
        plan_caches(arena, m, store);
    b->cache = arena->used - b->units - b->blocks - b->work - b->head;
    b->total = arena->used;
}

int decode_rows(const Recipe *r, int count)
{
    return format_is_fp8(r->operand) ? fp8_padded(count) : count;
}

size_t model_planned_bytes(const Model *m, const ParamStore *store)
{
    return m->bytes.total + store->gathered.used + store->exchange.used;
}

static int most_in_flight(const Model *m, const Pipeline *p)
{
    int most = 1;
    for (int chunk = 0; chunk < p->chunks && !m->text.forward_only; chunk++) {
        const int n = pipeline_in_flight(p, chunk);
        most = n > most ? n : most;
    }
    return most;
}

/* T: tokens of a sequence; P: positions. */
static void open_stream(Stream *s, const ModelConfig *mc, const Config *c, int T, int P,
                        int tensor_rank)
{
    *s = (Stream){ .config = mc,
                   .recipe = c->recipe,
                   .L = mc->n_layers,
                   .P = P,
                   .T = T,
                   .forward_only = config_forward_only(c),
                   .documents =
                       (c->data.generate_doc_lengths || c->length_warmup.steps > 0) && !c->generate,
                   .lora_scale = (float)lora_scale(&mc->lora),
                   .context = context_ranks(&c->strategy),
                   .tensor_ranks = tensor_ranks(&c->strategy),
                   .tensor_rank = tensor_rank };
    s->context_rank = comm_group_rank(RANKS_CONTEXT) % s->context; /* a dry run has no mesh */
    if (s->tensor_ranks > 1)
        tp_open(s);
    s->attn = (Attention){ .B = c->device_train_microbatch_size,
                           .T = T / s->context,
                           .H = s->config->n_heads,
                           .K = s->config->n_kv_heads,
                           .D = mc->head_dim,
                           .scale = (float)(1 / sqrt(mc->head_dim)),
                           .clip = mc->clip_qkv,
                           .norm = mc->norm };
    s->rows = s->tile = s->attn.B * s->attn.T;
    s->N = c->generate ? s->rows : s->rows / s->tensor_ranks;
    s->router.groups = mc->experts.balance == BALANCE_SEQUENCE ? s->attn.B : 1;
    s->host_doc_start = xmalloc(sizeof(int) * ((size_t)s->rows * (size_t)s->context + 1));
    s->host_part = xmalloc(sizeof(int) * (size_t)s->rows);
    context_allocate(s);
}

void model_plan(Model *m, ParamStore *store, const Config *c, ShardChoice p)
{
    const ModelConfig *mc = &c->model;
    const int P = mc->max_sequence_length + (c->generate ? decode_rows(&c->recipe, 1) - 1 : 0);
    const int T = !c->generate         ? P
                  : P > PREFILL_TOKENS ? PREFILL_TOKENS
                                       : decode_rows(&c->recipe, P);
    *m = (Model){ .observed = config_forward_only(c) ? c->observed : c->quant_stats_interval > 0 };
    *store = (ParamStore){ 0 };
    open_stream(&m->text, mc, c, T, P, p.tensor_rank);
    if (p.tile > 0 && p.tile < m->text.rows && !m->observed && !c->generate &&
        mc->experts.count == 0)
        m->text.tile = p.tile;
    m->num_sets = most_in_flight(m, &p.pipe);
    m->text.apart = unit_count(mc);
    m->sets = xcalloc((size_t)m->num_sets * (size_t)m->text.apart, sizeof *m->sets);
    m->text.blocks = m->sets + unit_of_layer(mc, 0);
    m->amax_at = xcalloc((size_t)unit_count(mc) + 1, sizeof *m->amax_at);
    stages_use_set(m, 0);
    m->host_sorted = xmalloc(sizeof *m->host_sorted * m->text.N);
    m->weighed.host =
        config_weighs_labels(c) ? xmalloc(3 * sizeof *m->weighed.host * (size_t)m->text.N) : NULL;
    m->soft.host =
        c->distill.kind == DISTILL_NONE
            ? NULL
            : xmalloc(sizeof *m->soft.host * (size_t)m->text.N * (2 * (size_t)c->top_k + 1));
    lifetimes_separate(m->shared);
    plan_all(&(Arena){ 0 }, m, store, c, p);
    lifetimes_record(m, store); /* the sets of live buffers are known only now */
    m->shared_bytes = overlay_place(m->shared, m->shared_least);
    plan_all(&(Arena){ 0 }, m, store, c, p);
}

/* Shared buffers do not depend on the placement of weights. */
void model_replan(Model *m, ParamStore *store, const Config *c, ShardChoice p)
{
    plan_all(&(Arena){ 0 }, m, store, c, p);
}

void model_place_tensors(Model *m, ParamStore *store, const Config *c)
{
    ShardChoice p = store_shard_choice(store);
    p.slots = m->offload.slots;
    plan_all(&(Arena){ .memory = m->memory }, m, store, c, p);
}
