/* Where units lie: the shards, the memory for gathered weights and for gradients, and all views of them. */
#include "model/fsdp_plan.h"

#include <stdlib.h>

#include "kernels/comm.h"
#include "kernels/error.h"
#include "model/trainable.h"

/* ---- which memory ----------------------------------------------------------------------------------------- */

static Format compute_format(const Fsdp *f, const Param *p)
{
    return p->is_operand ? f->recipe.operand : f->recipe.stream;
}

static bool is_block(const Fsdp *f, int u)
{
    return u > 0 && u < f->num_units - 1;
}

static const char *unit_name(const Fsdp *f, int u)
{
    return is_block(f, u) ? "a block" : u == 0 ? "the embedding" : "the head";
}

/* Of what is gathered. */
static Format unit_format(const Fsdp *f, int u)
{
    return is_block(f, u) ? f->recipe.operand : f->recipe.stream;
}

static Format stored_format(const Fsdp *f, Region r)
{
    return r == FROZEN ? f->recipe.frozen : f->recipe.master;
}

/* Weights that are stored whole and in the format that computes need no other copy. */
static bool needs_copy(const Fsdp *f, int u, Region r)
{
    if (r == BASE)
        return f->shape[u].numel[BASE] > 0;
    return f->shape[u].numel[r] > 0 && (f->shards > 1 || !format_equal(unit_format(f, u), stored_format(f, r)));
}

bool is_gathered(const Fsdp *f, int u, const Param *p)
{
    return format_equal(compute_format(f, p), unit_format(f, u)) && needs_copy(f, u, p->region);
}

bool is_replicated(const Fsdp *f, int u, const Param *p)
{
    return !format_equal(compute_format(f, p), unit_format(f, u))
        && (f->shards > 1 || !format_equal(f->recipe.stream, stored_format(f, p->region)));
}

size_t base_bytes(const Fsdp *f, size_t numel)
{
    return f->base == BASE_NF4 ? numel / NF4_GROUP * nf4_group_bytes(f->plain_nf4) : numel;
}

bool base_is_operand(const Fsdp *f)
{
    return f->base == BASE_E4M3 && f->recipe.operand.dtype == E4M3;
}

bool base_stays(const Fsdp *f, int u)
{
    return f->shape[u].numel[BASE] > 0 && base_is_operand(f) && u < f->kept;
}

/* Where a matrix begins in what its unit's take up as operands. */
static size_t base_operand_offset(const UnitShape *shape, const Param *p)
{
    size_t at = 0;
    for (const Param *q = shape->param; q < p; q++)
        at += q->region == BASE ? param_align(param_numel(q)) : 0;
    return at;
}

/* Codes are gathered to where operands stand, with the padding of the region. */
static size_t base_in_buffer(const Fsdp *f, int u)
{
    const UnitShape *shape = &f->shape[u];
    return base_is_operand(f) ? shape->numel[BASE] : base_operand_offset(shape, shape->param + shape->num_params);
}

float *base_scale(const Fsdp *f, int u, const Param *p)
{
    return (float *)f->base_scales.data + 4 * (NUM_LINEARS * (u - 1) + (int)p->linear);
}

/* 0 of a region whose parameters all stand elsewhere, as adapters beside FP8 operands do: nothing of it is gathered. */
static size_t numel_in_buffer(const Fsdp *f, int u, Region r)
{
    const UnitShape *shape = &f->shape[u];
    bool any = false;
    for (int i = 0; i < shape->num_params; i++)
        any |= shape->param[i].region == r && is_gathered(f, u, &shape->param[i]);
    if (!any)
        return 0;
    return r == BASE ? base_in_buffer(f, u) : f->shape[u].numel[r];
}

size_t region_in_buffer(const Fsdp *f, int u, Region r, size_t *first)
{
    *first = 0;
    for (Region before = 0; before < r; before++)
        *first += numel_in_buffer(f, u, before);
    return numel_in_buffer(f, u, r);
}

static size_t buffer_numel(const Fsdp *f, int u)
{
    size_t n = 0;
    for (Region r = 0; r < NUM_REGIONS; r++)
        n += numel_in_buffer(f, u, r);
    return n;
}

/* Memory that units share: two blocks take turns, of which one is gathered while the other computes; on one rank all have one. The
 * embedding is not needed with the head, unless it is the head. */
static int shared_buffer(const Fsdp *f, int u)
{
    return is_block(f, u) ? 2 + (f->shards > 1 ? u % 2 : 0) : u == 0 || !f->tied ? 0 : 1;
}

WeightBuffer *weight_buffer(const Fsdp *f, int u)
{
    const bool fp8 = format_is_fp8(unit_format(f, u));
    if (buffer_numel(f, u) == 0)
        return NULL;
    const bool stays = f->shards > 1 ? u < f->kept : f->shape[u].numel[BASE] ? base_stays(f, u) : !fp8;
    return &f->weight_buffer[stays ? SHARED_BUFFERS + u : shared_buffer(f, u)];
}

GradBuffer *grad_buffer(const Fsdp *f, int u)
{
    if (f->shape[u].numel[TRAINED] == 0 || f->shards == 1)
        return NULL;
    return &f->grad_buffer[f->sum_once ? SHARED_BUFFERS + u : shared_buffer(f, u)];
}

/* ---- placement -------------------------------------------------------------------------------------------- */

static Tensor flat(Arena *a, Format f, size_t n)
{
    CHECK(n <= INT32_MAX, "a unit of %zu elements", n);
    return n ? tensor_alloc(a, f, 1, (int)n) : (Tensor){ .format = f, .rows = 1 };
}

static void place_shard(Fsdp *f, Arena *a, int u, int rank)
{
    const Recipe *r = &f->recipe;
    Shard *s = &f->shard[u];
    s->count = f->shape[u].numel[TRAINED] / f->shards;
    s->first = s->count * rank;
    s->frozen_count = f->shape[u].numel[FROZEN] / f->shards;
    s->frozen_first = s->frozen_count * rank;
    s->master = flat(a, r->master, s->count);
    s->grad = flat(a, r->grads, s->count);
    for (int i = 0; i < f->optimizer->num_states; i++)
        s->state[i] = flat(a, optimizer_format(f->optimizer, i, r), s->count);
    s->frozen = flat(a, r->frozen, s->frozen_count);
    s->base_count = f->shape[u].numel[BASE] / f->shards;
    s->base_first = s->base_count * rank;
    s->base = s->base_count ? arena_alloc(a, base_bytes(f, s->base_count)) : NULL;
}

/* A buffer is as large as the largest unit that it serves. */
static void measure_buffers(Fsdp *f)
{
    for (int i = 0; i < num_buffers(f); i++) {
        f->weight_buffer[i].flat.cols = f->grad_buffer[i].flat.cols = 0;
        f->weight_buffer[i].raw_bytes = 0;
    }
    for (int u = 0; u < f->num_units; u++) {
        WeightBuffer *w = weight_buffer(f, u);
        GradBuffer *g = grad_buffer(f, u);
        const int weights = (int)buffer_numel(f, u), grads = (int)f->shape[u].numel[TRAINED];
        if (w) {
            w->flat.format = unit_format(f, u);
            w->flat.cols = weights > w->flat.cols ? weights : w->flat.cols;
            const size_t raw = f->shards > 1 && !base_is_operand(f) ? base_bytes(f, f->shape[u].numel[BASE]) : 0;
            w->raw_bytes = raw > w->raw_bytes ? raw : w->raw_bytes;
        }
        if (g)
            g->flat.cols = grads > g->flat.cols ? grads : g->flat.cols;
    }
}

static bool serves_blocks(const Fsdp *f, int buffer)
{
    return buffer >= SHARED_BUFFERS ? is_block(f, buffer - SHARED_BUFFERS)
                                    : buffer == shared_buffer(f, 1) || buffer == shared_buffer(f, 2);
}

/* Blocks whose stored matrices are the operands of forward have transposed copies alone. */
static bool has_rows(const Fsdp *f, int buffer)
{
    return !(serves_blocks(f, buffer) && f->shards == 1 && base_is_operand(f));
}

/* On one rank codes are made from stored weights for each use, so that the transposed ones can stand in place of the others; but
 * where backward runs a block's forward again it reads both. */
static bool takes_turns(const Fsdp *f, int buffer)
{
    return serves_blocks(f, buffer) && f->shards == 1 && !base_is_operand(f) && !recipe_recomputes(&f->recipe);
}

static void place_buffers(Fsdp *f, Arena *a)
{
    Arena *gathered = f->shards > 1 ? &f->gathered : a;
    measure_buffers(f);
    f->gathered.used = 0;
    for (int i = 0; i < num_buffers(f); i++) {
        WeightBuffer *w = &f->weight_buffer[i];
        GradBuffer *g = &f->grad_buffer[i];
        w->unit = g->unit = -1;
        if (w->flat.cols > 0) {
            const size_t n = w->flat.cols, bytes = n * dtype_size(w->flat.format.dtype);
            w->flat.rows = 1;
            w->flat.data = has_rows(f, i) ? arena_alloc(gathered, bytes) : NULL;
            w->raw = w->raw_bytes ? arena_alloc(gathered, w->raw_bytes) : NULL;
            w->flat.data_t = !format_is_fp8(w->flat.format) ? NULL : takes_turns(f, i) ? w->flat.data : arena_alloc(a, n);
        }
        if (g->flat.cols > 0)
            g->flat = flat(a, f->recipe.grads, g->flat.cols);
    }
}

/* Scales and norm weights of all units: together, so that one collective serves all. And room for optimizer_grad_norm. */
static void place_small(Fsdp *f, Arena *a)
{
    const Format f32 = { F32, 0, false };
    size_t operands[NUM_REGIONS] = { 0 }, replicated = 0;
    for (int u = 0; u < f->num_units; u++)
        for (int i = 0; i < f->shape[u].num_params; i++) {
            const Param *p = &f->shape[u].param[i];
            operands[p->region] += is_gathered(f, u, p) && format_is_fp8(unit_format(f, u));
            replicated += is_replicated(f, u, p) ? param_align(param_numel(p)) : 0;
        }
    f->scales = flat(a, f32, 4 * (operands[TRAINED] + operands[FROZEN]));
    f->base_scales = flat(a, f32, f->base != BASE_AS_FROZEN ? 4 * NUM_LINEARS * (size_t)(f->num_units - 2) : 0);
    f->trained_scales = (int)(4 * operands[TRAINED]);
    f->replicated = flat(a, f->recipe.stream, replicated);
    f->square_sum = arena_alloc(a, sizeof *f->square_sum);
}

static Tensor view_in_buffer(const Fsdp *f, int u, const Param *p, size_t *scales)
{
    const WeightBuffer *s = weight_buffer(f, u);
    const bool base = p->region == BASE, fp8 = format_is_fp8(s->flat.format);
    Tensor t = { .format = s->flat.format, .rows = p->rows, .cols = p->cols };
    size_t at;
    region_in_buffer(f, u, p->region, &at);
    at += base ? base_operand_offset(&f->shape[u], p) : p->offset;
    if (base && base_is_operand(f) && f->shards == 1)
        t.data = (char *)f->shard[u].base + p->offset;
    else
        t.data = (char *)s->flat.data + at * dtype_size(t.format.dtype);
    t.data_t = fp8 ? (char *)s->flat.data_t + at : NULL;
    if (fp8 && base)
        t.scale = base_scale(f, u, p);
    else if (fp8) {
        t.scale = (float *)f->scales.data + *scales;
        *scales += 4;
    }
    return t;
}

static void make_views(Fsdp *f)
{
    size_t scales[NUM_REGIONS] = { [FROZEN] = (size_t)f->trained_scales }, replicated = 0;
    for (int u = 0; u < f->num_units; u++) {
        const GradBuffer *g = grad_buffer(f, u);
        const Shard *s = &f->shard[u];
        f->dunit[u] = unit_views(&f->shape[u], g ? g->flat.data : s->grad.data, f->recipe.grads);
        for (int i = 0; i < f->shape[u].num_params; i++) {
            const Param *p = &f->shape[u].param[i];
            Tensor *w = &f->unit[u].tensor[p->id];
            if (is_replicated(f, u, p)) {
                const Format stream = f->recipe.stream;
                *w = tensor_at((char *)f->replicated.data + replicated * dtype_size(stream.dtype), stream, p->rows, p->cols);
                replicated += param_align(param_numel(p));
            } else if (is_gathered(f, u, p))
                *w = view_in_buffer(f, u, p, &scales[p->region]);
            else
                *w = param_view(p, p->region == FROZEN ? s->frozen.data : s->master.data, stored_format(f, p->region));
        }
    }
}

static void create(Fsdp *f, int num_units)
{
    f->num_units = num_units;
    f->shape = xcalloc(num_units, sizeof *f->shape);
    f->shard = xcalloc(num_units, sizeof *f->shard);
    f->unit = xcalloc(num_units, sizeof *f->unit);
    f->dunit = xcalloc(num_units, sizeof *f->dunit);
    f->weight_buffer = xcalloc(num_buffers(f), sizeof *f->weight_buffer);
    f->grad_buffer = xcalloc(num_buffers(f), sizeof *f->grad_buffer);
}

void fsdp_plan(Fsdp *f, Arena *a, const Config *c, Placement p)
{
    const ModelConfig *m = &c->model;
    if (!f->shape)
        create(f, m->n_layers + 2);
    f->recipe = c->recipe;
    f->optimizer = optimizer_find(c->optimizer.name);
    CHECK(f->optimizer, "no optimizer %s", c->optimizer.name);
    f->base = m->lora.base;
    f->plain_nf4 = m->lora.plain_nf4;
    f->tied = m->weight_tying;
    f->shards = p.shards;
    f->rank = p.rank;
    f->sum_once = p.sum_once;
    f->kept = p.kept;
    f->first_trained = f->num_units;
    size_t first = 0;
    for (int u = 0; u < f->num_units; u++) {
        UnitShape *shape = &f->shape[u];
        unit_shape(shape, m, u, p.shards);
        shape->first = first;
        first += unit_numbers(shape);
        trainable_mark(shape, c, u);
        unit_lay_out(shape, p.shards);
        if (unit_numbers(shape) > INT32_MAX - (size_t)(NUM_REGIONS * PARAM_ALIGN * p.shards))
            die("%s has %zu parameters; a unit can have %d. Smaller model.d_model, model.mlp_hidden_size or vocabulary",
                unit_name(f, u), unit_numbers(shape), INT32_MAX);
        const size_t all = shape->numel[TRAINED] + shape->numel[FROZEN] + shape->numel[BASE];
        if (all > INT32_MAX)
            die("%s has %zu numbers, those of adapters among them; a unit can have %d. Smaller lora.rank", unit_name(f, u), all,
                INT32_MAX);
        if (shape->numel[TRAINED] > 0 && u < f->first_trained)
            f->first_trained = u;
        place_shard(f, a, u, p.rank);
    }
    place_buffers(f, a);
    place_small(f, a);
    make_views(f);
}

void fsdp_place_gathered(Fsdp *f)
{
    if (f->shards > 1)
        f->gathered.base = comm_alloc(f->gathered.used);
}

/* ---- asking ----------------------------------------------------------------------------------------------- */

size_t shard_part(const Shard *s, const Param *p, size_t *first)
{
    *first = 0;
    if (p->region == BASE)
        return 0;
    const size_t begin = p->region == FROZEN ? s->frozen_first : s->first;
    const size_t end = begin + (p->region == FROZEN ? s->frozen_count : s->count);
    size_t from = p->offset, to = from + (size_t)p->rows * p->cols;
    from = from > begin ? from : begin;
    to = to < end ? to : end;
    *first = from < to ? from - p->offset : 0;
    return from < to ? to - from : 0;
}

static Tensor view(Tensor t, size_t at, size_t n)
{
    t.data = (char *)t.data + at * dtype_size(t.format.dtype);
    if (t.format.group)
        t.scale = (char *)t.scale + format_scale_bytes(t.format, at);
    t.cols = (int)n;
    return t;
}

Tensor shard_view(const Shard *s, Tensor t, size_t first, size_t n)
{
    return view(t, first - s->first, n);
}

Tensor shard_weights(const Shard *s, const Param *p, size_t first, size_t n)
{
    const size_t at = p->offset + first;
    return p->region == FROZEN ? view(s->frozen, at - s->frozen_first, n) : view(s->master, at - s->first, n);
}

static size_t buffer_bytes(const Fsdp *f, int buffer)
{
    const Tensor t = f->weight_buffer[buffer].flat;
    const bool turned = format_is_fp8(t.format) && !takes_turns(f, buffer);
    return (size_t)t.cols * (dtype_size(t.format.dtype) * has_rows(f, buffer) + turned);
}

size_t fsdp_weight_bytes(const Fsdp *f)
{
    size_t bytes = tensor_bytes(f->scales) + tensor_bytes(f->base_scales) + tensor_bytes(f->replicated);
    for (int i = 0; i < num_buffers(f); i++)
        bytes += buffer_bytes(f, i) + f->weight_buffer[i].raw_bytes;
    return bytes;
}

size_t fsdp_grad_bytes(const Fsdp *f)
{
    size_t bytes = 0;
    for (int u = 0; u < f->num_units; u++)
        bytes += tensor_bytes(f->shard[u].grad);
    for (int i = 0; i < num_buffers(f); i++)
        bytes += (size_t)f->grad_buffer[i].flat.cols * dtype_size(f->recipe.grads.dtype);
    return bytes;
}

size_t fsdp_state_bytes(const Fsdp *f)
{
    size_t bytes = 0;
    for (int u = 0; u < f->num_units; u++)
        for (int i = 0; i < f->optimizer->num_states; i++)
            bytes += tensor_bytes(f->shard[u].state[i]);
    return bytes;
}

void fsdp_free(Fsdp *f)
{
    for (int i = 0; f->shape && i < num_buffers(f); i++) {
        device_unmark(f->weight_buffer[i].ready);
        device_unmark(f->weight_buffer[i].released);
        device_unmark(f->grad_buffer[i].filled);
        device_unmark(f->grad_buffer[i].reduced);
    }
    device_unmark(f->updated);
    device_unmark(f->reduced);
    if (f->gathered.base)
        comm_free(f->gathered.base);
    free(f->shape), free(f->shard), free(f->unit), free(f->dunit), free(f->weight_buffer), free(f->grad_buffer);
    *f = (Fsdp){ 0 };
}
