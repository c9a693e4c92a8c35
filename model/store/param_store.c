/* Places the units in memory, and lists the steps from stored weights to operands: the shards, the
 * memory for gathered weights and for gradients, and all views of them. */
#include "model/store/param_store.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/collectives.h"
#include "kernels/runtime/error.h"
#include "model/shape/trainable.h"
#include "model/shape/units.h"
#include "model/store/grad_wire.h"
#include "model/store/param_store_sizes.h"

/* ---- the steps of a weight ------------------------------------------------------------------- */

/* Stored formats. SAME: the format that computes. OTHER: another format. CODES: E4M3 of region
 * QUANTIZED, while other formats compute. GROUPS: NF4 of region QUANTIZED. Computing formats. WIDE:
 * F32 or BF16. FP8: an operand. APART: F32 or BF16 in a unit whose buffer holds FP8 operands, for
 * norms and adapters. */
typedef enum { SAME, OTHER, CODES, GROUPS, NUM_STORED } Stored;
typedef enum { WIDE, FP8, APART, NUM_COMPUTING } Computing;

/* All possible cases. A list of steps ends with NO_STEP. */
static const struct {
    Step alone[4], sharded[4];
} ways[NUM_STORED][NUM_COMPUTING] = {
    /* computes     on one rank            in a shard group */
    [SAME] = { [WIDE] = { { VIEW }, { CAST_SLICE, GATHER } },
               /* the stored operand: E4M3 of region QUANTIZED, or codes from the update */
               [FP8] = { { VIEW, TRANSPOSE }, { GATHER, TRANSPOSE } },
               [APART] = { { VIEW }, { REPLICATE } } },
    [OTHER] = { [WIDE] = { { CAST }, { CAST_SLICE, GATHER } },
                [FP8] = { { CAST }, { CAST_SLICE, GATHER, TRANSPOSE } },
                [APART] = { { REPLICATE }, { REPLICATE } } },
    [CODES] = { [WIDE] = { { CAST }, { GATHER, CAST } }, [FP8] = { { CAST }, { GATHER, CAST } } },
    [GROUPS] = { [WIDE] = { { DEQUANTIZE }, { GATHER, DEQUANTIZE } },
                 [FP8] = { { DEQUANTIZE }, { GATHER, DEQUANTIZE } } },
};

static const int uses_of[NUM_STEPS] = {
    [CAST_SLICE] = AS_STORED,
    [FETCH] = AS_STORED,
    [GATHER] = AS_STORED,
    [REPLICATE] = AT_UPDATE,
    [ENCODE] = AT_LOAD,
    [TRANSPOSE] = FOR_BACKWARD,
    [CAST] = FOR_FORWARD | FOR_BACKWARD,
    [DEQUANTIZE] = FOR_FORWARD | FOR_BACKWARD,
};

static bool takes(const Step *way, Step step)
{
    while (*way && *way != step)
        way++;
    return *way != NO_STEP;
}

/* Whether the steps compute the weight from stored weights, and do not copy it unchanged to the
 * unit's buffer. */
static bool is_remade(const Step *way)
{
    return takes(way, CAST) || takes(way, DEQUANTIZE);
}

static bool is_in_buffer(const Step *way)
{
    return takes(way, GATHER) || takes(way, TRANSPOSE) || is_remade(way);
}

/* The format of the unit's buffer. */
static Format buffer_format(const ParamStore *store, int u)
{
    return store->shape[u].kind->is_layer ? store->recipe.operand : store->recipe.residual;
}

/* Only operands have a gather_input that differs from the stored weights. */
static Tensor gather_input_of(const ParamStore *store, int u, const Param *p)
{
    const Slice *s = &store->shard[u].slice[p->region];
    return p->is_operand ? s->gather_input : s->stored;
}

bool store_encodes(const ParamStore *store, int u, const Param *p)
{
    return p->region == TRAINED && p->is_operand && store_on_host(store, u, HOST_MASTER);
}

/* Whether the weight takes the steps of a shard group, even on one rank. This is so for weights on
 * the host, because the device cannot use them in place: frozen weights are fetched and gathered
 * (on one rank a copy), and trained norms are copied once per step. */
static bool goes_as_sharded(const ParamStore *store, int u, const Param *p, const Step *alone)
{
    if (fsdp_shards(store, u) > 1)
        return true;
    if (p->region == TRAINED)
        return store_on_host(store, u, HOST_MASTER) && !p->is_operand && takes(alone, VIEW);
    return store_on_host(store, u, HOST_FROZEN);
}

static const Step *find_way(const ParamStore *store, int u, const Param *p)
{
    const Format buffer = buffer_format(store, u),
                 computes = p->is_operand ? store->recipe.operand : store->recipe.residual;
    const Stored stored = p->region == QUANTIZED && store->base_format == BASE_NF4      ? GROUPS
                          : format_equal(gather_input_of(store, u, p).format, computes) ? SAME
                          : p->region == QUANTIZED                                      ? CODES
                                                                                        : OTHER;
    const Computing computing = !format_equal(computes, buffer) ? APART
                                : format_is_fp8(buffer)         ? FP8
                                                                : WIDE;
    const Step *alone = ways[stored][computing].alone;
    const Step *way = goes_as_sharded(store, u, p, alone) ? ways[stored][computing].sharded : alone;
    CHECK(*way, "there are no steps that convert the stored %s to %s", p->name,
          format_name(computes));
    return way;
}

/* ---- which memory ---------------------------------------------------------------------------- */

/* The number of the unit's buffer. Units share buffers: layers alternate between two buffers, so
 * that one is gathered while the other computes. If nothing overlaps, layers share one buffer.
 * Embedding and head share a buffer, unless they are tied. Other units have their own buffers. */
static int buffer_of(const ParamStore *store, int u, bool own)
{
    const UnitKind *k = store->shape[u].kind;
    if (k->is_layer && !own)
        return 2 + (store->overlaps ? u % 2 : 0);
    if (own || (unit_reads_stream(k) && unit_writes_stream(k)))
        return NUM_ROTATING + u;
    return !unit_writes_stream(k) && store->tied;
}

/* On one rank, F32 and BF16 weights are views or small copies, and all of them stay. Stored codes
 * never change, so their gathered copies and their transposes stay valid. */
static Lifetime lifetime_of(const ParamStore *store, int u)
{
    const bool fp8 = format_is_fp8(buffer_format(store, u)),
               quantized = store->shape[u].numel[QUANTIZED] > 0;
    if (u < store->resident && quantized && store->base_format == BASE_E4M3 &&
        store->recipe.operand.dtype == E4M3)
        return FOR_GOOD;
    return u < store->resident || (fsdp_shards(store, u) == 1 && !fp8 && !quantized &&
                                   !store_on_host(store, u, HOST_FROZEN))
               ? UNTIL_UPDATE
               : UNTIL_REUSE;
}

/* Records the unit's requirements for its buffer. A buffer is as large as its largest unit. */
static void plan_buffers(ParamStore *store, int u)
{
    static const Step nothing[] = { NO_STEP };
    const UnitLayout *shape = &store->shape[u];
    UnitPlan *plan = &store->plan[u];
    size_t numel[NUM_REGIONS] = { 0 }, raw = 0;
    bool rows = false, transposes_rows = false;
    for (int i = 0; i < shape->num_params; i++) {
        const Region r = shape->param[i].region;
        const Step *way = plan->way[i] =
            store_holds(store, u) ? find_way(store, u, &shape->param[i]) : nothing;
        if (!is_in_buffer(way))
            continue;
        numel[r] = is_remade(way) ? shape->computing[r] : shape->numel[r];
        raw = is_remade(way) && takes(way, GATHER) ? shape->numel[r] : raw;
        rows |= !takes(way, VIEW);
        transposes_rows |= takes(way, GATHER) && takes(way, TRANSPOSE);
    }
    plan->numel = 0;
    for (Region r = 0; r < NUM_REGIONS; r++) {
        plan->at[r] = plan->numel;
        plan->numel += numel[r];
    }
    plan->lifetime = lifetime_of(store, u);
    plan->grads = store->shard[u].slice[TRAINED].count > 0 && fsdp_shards(store, u) > 1
                      ? &store->grad_buffer[buffer_of(store, u, store->sum_once)]
                      : NULL;
    plan->weights = plan->numel > 0
                        ? &store->weight_buffer[buffer_of(store, u, plan->lifetime != UNTIL_REUSE)]
                        : NULL;
    if (plan->grads && tensor_numel(plan->grads->elements) < shape->numel[TRAINED])
        plan->grads->elements = tensor_flat(plan->grads->elements, shape->numel[TRAINED]);
    WeightBuffer *w = plan->weights;
    if (!w)
        return;
    w->elements.format = buffer_format(store, u);
    if (tensor_numel(w->elements) < plan->numel)
        w->elements = tensor_flat(w->elements, plan->numel);
    w->raw_bytes = raw > w->raw_bytes ? raw : w->raw_bytes;
    w->has_rows |= rows;
    w->has_transposes = format_is_fp8(w->elements.format) && !store->forward_only;
    w->transposes_rows |= transposes_rows;
    w->rotates = rows && w->has_transposes && fsdp_shards(store, u) == 1 &&
                 plan->lifetime == UNTIL_REUSE && !recipe_recomputes(&store->recipe) &&
                 !w->transposes_rows;
}

/* ---- placement ------------------------------------------------------------------------------- */

static Tensor alloc_elements(Arena *a, Format f, size_t n)
{
    const Tensor t = tensor_flat((Tensor){ .format = f }, n);
    return n ? tensor_alloc(a, f, t.rows, t.cols) : t;
}

static Tensor alloc_codes(Arena *a, DType dtype, size_t n)
{
    return tensor_flat(
        (Tensor){ .format = { dtype, 0, false }, .data = n ? arena_alloc(a, n) : NULL }, n);
}

static void place_shard(ParamStore *store, Arena *device, int u)
{
    const Recipe *r = &store->recipe;
    const bool master_on_host = store_on_host(store, u, HOST_MASTER),
               in_layer = store->shape[u].kind->is_layer;
    Arena *frozen = store_on_host(store, u, HOST_FROZEN) ? &store->host : device;
    Arena *moments = store_on_host(store, u, HOST_MOMENTS) ? &store->host : device;
    Shard *s = &store->shard[u];
    for (Region i = 0; i < NUM_REGIONS; i++) {
        s->slice[i].count =
            store_holds(store, u) ? store->shape[u].numel[i] / (size_t)fsdp_shards(store, u) : 0;
        s->slice[i].first = s->slice[i].count * (size_t)fsdp_rank(store, u);
    }
    const size_t n = s->slice[TRAINED].count, codes = s->slice[QUANTIZED].count;
    s->slice[TRAINED].stored = alloc_elements(master_on_host ? &store->host : device, r->master, n);
    s->grad = alloc_elements(device, r->grads, n);
    for (int i = 0; i < store->optimizer->num_states; i++) {
        shard_divide_state(store, u, i);
        s->state[i] = alloc_elements(moments, optimizer_format(store->optimizer, i, r, in_layer),
                                     n - s->before[i] - s->after[i]);
    }
    s->slice[FROZEN].stored = alloc_elements(frozen, r->frozen, s->slice[FROZEN].count);
    s->slice[QUANTIZED].stored = alloc_codes(frozen, E4M3, codes);
    for (Region i = 0; i < NUM_REGIONS; i++)
        s->slice[i].gather_input = s->slice[i].stored;
    if (master_on_host)
        s->slice[TRAINED].gather_input = format_is_fp8(r->operand)
                                             ? alloc_codes(device, r->operand.dtype, n)
                                             : alloc_elements(device, r->operand, n);
}

static void place_buffers(ParamStore *store, Arena *a)
{
    Arena *gathered = store->shards * store->tensor_ranks > 1 ? &store->gathered : a;
    store->gathered.used = 0;
    for (int i = 0; i < num_buffers(store); i++) {
        WeightBuffer *w = &store->weight_buffer[i];
        GradBuffer *g = &store->grad_buffer[i];
        w->unit = g->unit = -1;
        if (tensor_numel(w->elements) > 0) {
            const size_t n = tensor_numel(w->elements),
                         bytes = n * dtype_size(w->elements.format.dtype);
            w->elements.data = w->has_rows ? arena_alloc(gathered, bytes) : NULL;
            w->raw = w->raw_bytes ? arena_alloc(gathered, w->raw_bytes) : NULL;
            w->elements.data_t = !w->has_transposes ? NULL
                                 : w->rotates       ? w->elements.data
                                                    : arena_alloc(a, n);
        }
        if (tensor_numel(g->elements) > 0)
            g->elements = alloc_elements(a, store->recipe.grads, tensor_numel(g->elements));
    }
}

/* Places tensors that serve all units: the scales and norm weights of all units, so that one
 * collective serves all; and the sum of optimizer_grad_norm. */
static void place_small(ParamStore *store, Arena *a)
{
    const Format f32 = { F32, 0, false };
    size_t operands[NUM_REGIONS] = { 0 }, quantized = 0, replicated = 0;
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            Param *p = &store->shape[u].param[i];
            const Step *way = store->plan[u].way[i];
            p->quantized_scale = quantized;
            quantized += p->region == QUANTIZED ? SCALE_FLOATS : 0;
            operands[store_encodes(store, u, p) ? FROZEN : p->region] +=
                is_in_buffer(way) && format_is_fp8(buffer_format(store, u));
            replicated += takes(way, REPLICATE) ? param_align(param_numel(p)) : 0;
        }
    store->scales = alloc_elements(a, f32, SCALE_FLOATS * (operands[TRAINED] + operands[FROZEN]));
    store->quantized_scales = alloc_elements(a, f32, quantized);
    store->trained_scales = (int)(SCALE_FLOATS * operands[TRAINED]);
    store->replicated = alloc_elements(a, store->recipe.residual, replicated);
    store->square_sum = arena_alloc(a, sizeof *store->square_sum);
}

float *quantized_scale(const ParamStore *store, const Param *p)
{
    return (float *)store->quantized_scales.data + p->quantized_scale;
}

/* A whole parameter in its stored format: on one rank, in the shard; otherwise in the buffer in
 * which it is gathered before it is converted. */
static Tensor stored_whole(const ParamStore *store, int u, const Param *p)
{
    const bool gathered = takes(store->plan[u].way[p - store->shape[u].param], GATHER);
    Tensor t = gather_input_of(store, u, p);
    t.data = (char *)(gathered ? store->plan[u].weights->raw : t.data) +
             p->offset * dtype_size(t.format.dtype);
    t.scale = p->region == QUANTIZED ? quantized_scale(store, p) : NULL;
    t.rows = p->rows;
    t.cols = p->cols;
    return t;
}

static Tensor place_in_buffer(const ParamStore *store, int u, const Param *p, bool is_view,
                              size_t *scales)
{
    const UnitPlan *plan = &store->plan[u];
    const size_t at = plan->at[p->region] + p->gathered_at;
    const bool fp8 = format_is_fp8(plan->weights->elements.format);
    Tensor t = plan->weights->elements;
    t.data =
        is_view ? stored_whole(store, u, p).data : (char *)t.data + at * dtype_size(t.format.dtype);
    t.data_t = t.data_t ? (char *)t.data_t + at : NULL;
    t.rows = p->rows;
    t.cols = p->cols;
    if (fp8 && p->region == QUANTIZED)
        t.scale = quantized_scale(store, p);
    else if (fp8) {
        t.scale = (float *)store->scales.data + *scales;
        *scales += SCALE_FLOATS;
    }
    return t;
}

/* A parameter that begins at element `at` of a flat F32 or BF16 tensor. */
static Tensor param_view(const Param *p, Tensor flat, size_t at)
{
    return tensor_at((char *)flat.data + at * dtype_size(flat.format.dtype), flat.format, p->rows,
                     p->cols);
}

static void place_weights(ParamStore *store)
{
    size_t scales[NUM_REGIONS] = { [FROZEN] = (size_t)store->trained_scales }, replicated = 0;
    for (int u = 0; u < store->num_units; u++) {
        if (!store_holds(store, u))
            continue;
        const Tensor grads =
            store->plan[u].grads ? store->plan[u].grads->elements : store->shard[u].grad;
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            const Step *way = store->plan[u].way[i];
            Tensor w;
            if (takes(way, REPLICATE)) {
                w = param_view(p, store->replicated, replicated);
                replicated += param_align(param_numel(p));
            } else
                w = !is_in_buffer(way)
                        ? stored_whole(store, u, p)
                        : place_in_buffer(store, u, p, takes(way, VIEW),
                                          &scales[store_encodes(store, u, p) ? FROZEN : p->region]);
            if (p->item > 0)
                continue; /* the items of a parameter follow its first item */
            const Param stack = param_stack(p);
            w.rows = stack.rows;
            store->unit[u].tensor[p->id] = w;
            if (p->region == TRAINED)
                store->dunit[u].tensor[p->id] = param_view(&stack, grads, p->offset);
        }
    }
}

/* ---- the list of copies ---------------------------------------------------------------------- */

static void add_copy(UnitPlan *plan, Step step, const Param *p, int items, Tensor from, Tensor to)
{
    plan->copy = xrealloc(plan->copy, (size_t)(plan->num_copies + 1) * sizeof *plan->copy);
    plan->copy[plan->num_copies++] = (Copy){ step, uses_of[step], p, items, from, to };
    plan->made |= uses_of[step];
}

/* Whether one copy makes this step for item p and for the item before it. A step on slices does so
 * only if this rank holds both items completely. */
static bool joins_previous(const ParamStore *store, int u, const Param *p, Step step)
{
    const Shard *s = &store->shard[u];
    size_t first;
    if (p->item == 0)
        return false;
    return step == CAST || step == TRANSPOSE || step == DEQUANTIZE ||
           ((step == CAST_SLICE || step == REPLICATE) &&
            shard_part(s, p - 1, &first) == p->stored && shard_part(s, p, &first) == p->stored);
}

static void add_step(ParamStore *store, int u, const Param *p, Step step)
{
    Tensor w = param_tensor(&store->unit[u], p), from = w;
    size_t first, n = shard_part(&store->shard[u], p, &first);
    int items = 1;
    if (joins_previous(store, u, p, step))
        return;
    while (p->item + items < p->items && joins_previous(store, u, p + items, step))
        items++;
    if (step == CAST_SLICE || step == REPLICATE) {
        if (n == 0)
            return;
        from = slice_view(&store->shard[u].slice[p->region], gather_input_of(store, u, p),
                          p->offset + first, n);
        w.data = (char *)w.data + first * dtype_size(w.format.dtype);
        w.data_t = NULL;
        w.rows = 1;
        w.cols = (int)n;
    } else if (step == TRANSPOSE)
        from.data_t = w.data = NULL;
    else if (step != VIEW)
        from = stored_whole(store, u, p);
    /* one row: its length is a multiple of 8 even if the length of the matrix's rows is not */
    if (step == CAST && !w.data_t) {
        from.cols = w.cols = p->rows * p->cols;
        from.rows = w.rows = 1;
    }
    from.rows *= items;
    w.rows *= items;
    add_copy(&store->plan[u], step, p, items, from, w);
}

/* Lists the gather of a region. A slice that was cast to its place in the buffer is gathered in
 * place. Other slices are gathered in the stored format; slices of the region QUANTIZED go to the
 * memory from which they are converted. Slices on the host are first fetched to their place. */
static void add_gather(ParamStore *store, int u, Region r, bool casts)
{
    const Slice *s = &store->shard[u].slice[r];
    const WeightBuffer *w = store->plan[u].weights;
    const size_t size = dtype_size(w->elements.format.dtype);
    Tensor whole = w->elements, own = s->gather_input;
    whole.data = (char *)whole.data + store->plan[u].at[r] * size;
    if (r == QUANTIZED && w->raw) {
        whole.data = w->raw;
        whole.format = own.format;
    }
    const bool fetches = !casts && r != TRAINED && store_on_host(store, u, HOST_FROZEN);
    if (casts || fetches) {
        own = whole;
        own.data = (char *)own.data + s->first * dtype_size(own.format.dtype);
        own = tensor_flat(own, s->count);
    }
    if (fetches)
        add_copy(&store->plan[u], FETCH, NULL, 1, s->gather_input, own);
    add_copy(&store->plan[u], GATHER, NULL, 1, own, whole);
}

/* Lists the copies from master weights on the host to the tensor from which operands are gathered
 * or computed. */
static void add_encode(ParamStore *store, int u, const Param *p)
{
    const Slice *s = &store->shard[u].slice[p->region];
    size_t first, n = shard_part(&store->shard[u], p, &first);
    if (!store_encodes(store, u, p) || n == 0)
        return;
    Tensor to = slice_view(s, s->gather_input, p->offset + first, n);
    to.scale = param_tensor(&store->unit[u], p).scale;
    add_copy(&store->plan[u], ENCODE, p, 1, shard_weights(&store->shard[u], p, first, n), to);
}

/* Lists the copies of a unit: first, region by region, each rank's work on its slices and the
 * gathers; then the conversions of whole parameters. */
static void list_copies(ParamStore *store, int u)
{
    const UnitLayout *shape = &store->shape[u];
    UnitPlan *plan = &store->plan[u];
    plan->num_copies = plan->made = 0;
    for (int i = 0; i < shape->num_params; i++)
        add_encode(store, u, &shape->param[i]);
    for (int whole = 0; whole < 2; whole++)
        for (Region r = 0; r < NUM_REGIONS; r++) {
            bool gathers = false, casts = false;
            for (int i = 0; i < shape->num_params; i++)
                for (const Step *step = plan->way[i]; shape->param[i].region == r && *step;
                     step++) {
                    gathers |= !whole && *step == GATHER;
                    casts |= *step == CAST_SLICE;
                    if (whole ? *step > GATHER : *step < GATHER)
                        add_step(store, u, &shape->param[i], *step);
                }
            if (gathers)
                add_gather(store, u, r, casts);
        }
}

/* ---- the plan -------------------------------------------------------------------------------- */

static void create(ParamStore *store, const Config *c)
{
    const int n = store->num_units = unit_count(&c->model);
    store->tensor = hf_tensors_of(&c->model, &store->num_tensors);
    store->shape = trainable_shapes(c, store->tensor, store->num_tensors);
    store->shard = xcalloc(n, sizeof *store->shard);
    store->plan = xcalloc(n, sizeof *store->plan);
    for (int u = 0; u < n; u++)
        store->plan[u].way =
            xcalloc((size_t)store->shape[u].num_params + 1, sizeof *store->plan[u].way);
    store->unit = xcalloc(n, sizeof *store->unit);
    store->dunit = xcalloc(n, sizeof *store->dunit);
    store->weight_buffer = xcalloc(num_buffers(store), sizeof *store->weight_buffer);
    store->grad_buffer = xcalloc(num_buffers(store), sizeof *store->grad_buffer);
}

void store_plan(ParamStore *store, Arena *a, const Config *c, ShardChoice p)
{
    if (!store->shape)
        create(store, c);
    store->recipe = c->recipe;
    store->optimizer = optimizer_find(c->optimizer.name);
    CHECK(store->optimizer, "no optimizer %s", c->optimizer.name);
    if (c->average.last > 0)
        store->optimizer = optimizer_averaged(store->optimizer);
    store->base_format = c->model.lora.base;
    store->tied = c->model.weight_tying;
    store->shards = p.shards;
    store->rank = p.rank;
    store->tensor_ranks = p.tensor_ranks > 1 ? p.tensor_ranks : 1;
    store->tensor_rank = p.tensor_rank;
    store->plain_nf4 = c->model.lora.plain_nf4 || store->tensor_ranks > 1;
    store->sum_once = p.sum_once;
    store->replicas = p.replicas > 1 ? p.replicas : 1;
    store->wire = p.shards * store->replicas > 1 ? c->strategy.wire : WIRE_NONE;
    store->resident = p.resident;
    store->pipe = p.pipe.stages > 0 ? p.pipe : (Pipeline){ 1, 0, 1, PIPELINE_1F1B, 1 };
    store->forward_only = config_forward_only(c);
    memcpy(store->on_host, p.on_host, sizeof store->on_host);
    store->overlaps = p.shards * store->tensor_ranks > 1 || p.on_host[HOST_FROZEN] > 0;
    store->host.used = 0;
    store->first_trained = store->num_units;
    for (int i = 0; i < num_buffers(store); i++) {
        store->weight_buffer[i] = (WeightBuffer){ .gather = store->weight_buffer[i].gather };
        store->grad_buffer[i].elements = (Tensor){ 0 };
    }
    for (int u = 0; u < store->num_units; u++) {
        store->shape[u].matrices_first =
            store->optimizer->orthogonalizes || store->wire != WIRE_NONE;
        if (store->shape[u].kind->is_layer && store->shape[u].tensor_ranks < store->tensor_ranks)
            unit_cut(&store->shape[u], store->tensor_ranks, store->tensor_rank, p.shards);
        unit_lay_out(&store->shape[u],
                     fsdp_shards(store, u) * (store->wire != WIRE_NONE ? store->replicas : 1));
        unit_check_size(&store->shape[u], u);
        if (store->shape[u].numel[TRAINED] > 0 && u < store->first_trained)
            store->first_trained = u;
        place_shard(store, a, u);
        plan_buffers(store, u);
    }
    place_buffers(store, a);
    place_small(store, a);
    grad_wire_place(store);
    place_weights(store);
    for (int u = 0; u < store->num_units; u++)
        list_copies(store, u);
}

void store_alloc_gathered(ParamStore *store)
{
    store->placed = true;
    if (store->host.used > 0)
        store->host.memory =
            device_host_alloc(store->host.used, "weights and the optimizer's states");
    if (store->shards * store->tensor_ranks > 1)
        store->gathered.memory = comm_alloc(store->gathered.used, FOR_WEIGHTS);
    if (store->exchange.used > 0)
        store->exchange.memory = comm_alloc(store->exchange.used, FOR_GRADIENTS);
}

void store_free(ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++)
        free(store->plan[u].way), free(store->plan[u].copy);
    for (int i = 0; store->shape && i < num_buffers(store); i++) {
        transfer_free(&store->weight_buffer[i].gather);
        transfer_free(&store->grad_buffer[i].reduce);
    }
    device_unmark(store->updated);
    if (store->gathered.memory)
        comm_free(store->gathered.memory);
    if (store->exchange.memory)
        comm_free(store->exchange.memory);
    if (store->host.memory)
        device_host_free(store->host.memory);
    units_free(store->shape, store->num_units);
    free(store->tensor), free(store->shard), free(store->plan);
    free(store->unit), free(store->dunit);
    free(store->weight_buffer), free(store->grad_buffer);
    *store = (ParamStore){ 0 };
}
