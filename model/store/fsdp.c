/* FSDP's functions. param_store.c places the units in memory and lists their copies. */
#include "model/store/fsdp.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/collectives.h"
#include "kernels/dynamic8.h"
#include "kernels/random.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/store/grad_wire.h"
#include "model/store/param_store_sizes.h"
#include "model/store/quantized_weights.h"

/* ---- weights --------------------------------------------------------------------------------- */

/* Makes every copy of the unit that serves one of `uses`, in the order of the plan. */
static void make_copies(const ParamStore *store, int u, int uses)
{
    const UnitPlan *plan = &store->plan[u];
    for (const Copy *c = plan->copy; c < plan->copy + plan->num_copies; c++) {
        const bool fp8 = format_is_fp8(c->to.format);
        Tensor to = c->to;
        if (!(c->uses & uses))
            continue;
        if (fp8 && c->uses & FOR_FORWARD & ~uses)
            to.data = NULL;
        if (fp8 && c->uses & FOR_BACKWARD & ~uses)
            to.data_t = NULL;
        if (c->step == FETCH)
            device_copy(to.data, c->from.data, tensor_numel(to) * dtype_size(to.format.dtype));
        else if (c->step == GATHER) {
            watchdog_mark_together("all-gather", u);
            comm_all_gather(to.data, c->from.data,
                            tensor_numel(c->from) * dtype_size(c->from.format.dtype),
                            fsdp_group(store, u));
        } else if (c->step == DEQUANTIZE) {
            Nf4 stack = param_nf4(c->param, c->from.data, store->plain_nf4);
            stack.items = c->items;
            nf4_dequantize(to, stack);
        } else
            quantize_item_codes(to, c->from, c->items);
    }
}

void fsdp_gather(ParamStore *store, int u, int uses)
{
    const int both = FOR_FORWARD | FOR_BACKWARD;
    const bool once = fsdp_shards(store, u) == 1 && store->plan[u].lifetime != UNTIL_REUSE &&
                      !store->forward_only;
    WeightBuffer *b = store->plan[u].weights;
    if (!b || !store->placed)
        return;
    if (b->unit != u) {
        b->unit = u;
        b->has = 0;
    }
    /* computes W and its transpose in one pass over the stored weights */
    if (!format_is_fp8(b->elements.format) || once)
        uses = both;
    else if (b->rotates && !(b->has & uses)) {
        CHECK(uses == FOR_FORWARD || uses == FOR_BACKWARD,
              "unit %d has memory for one use at a time", u);
        b->has = 0;
    }
    uses &= ~b->has;
    if (!uses)
        return;
    /* if nothing else is copied, a cast on another queue would only slow the GEMMs */
    if (store->overlaps)
        transfer_start(&b->gather, QUEUE_GATHER);
    trace_begin("gather", u);
    uses |= AS_STORED & ~b->has;
    make_copies(store, u, uses);
    b->has |= uses | (both & ~store->plan[u].made);
    trace_end();
    if (store->overlaps)
        transfer_end(&b->gather);
}

void fsdp_gather_ahead(ParamStore *store, int u, int uses)
{
    if (store->overlaps)
        fsdp_gather(store, u, uses);
}

const UnitTensors *fsdp_acquire(ParamStore *store, int u)
{
    const WeightBuffer *b = store->plan[u].weights;
    if (!store->placed)
        return &store->unit[u];
    watchdog_mark("computation", u);
    if (b) {
        CHECK(b->unit == u, "unit %d is acquired but was not gathered", u);
        transfer_wait(&b->gather, "weights", u);
    }
    return &store->unit[u];
}

void fsdp_release(ParamStore *store, int u)
{
    WeightBuffer *b = store->plan[u].weights;
    if (b && store->overlaps && store->placed)
        transfer_allow(&b->gather);
}

/* ---- gradients ------------------------------------------------------------------------------- */

static Tensor own_slice(const ParamStore *store, int u, const GradBuffer *s)
{
    Tensor t = s->elements;
    t.data = (char *)t.data + store->shard[u].slice[TRAINED].first * dtype_size(t.format.dtype);
    return tensor_flat(t, store->shard[u].slice[TRAINED].count);
}

/* Elements `first` to `end` - 1 of a unit's gradients, which begin at `data`. */
static void zero_between(const ParamStore *store, void *data, size_t first, size_t end)
{
    const size_t size = dtype_size(store->recipe.grads.dtype);
    if (first < end)
        device_zero((char *)data + first * size, (end - first) * size);
}

/* Makes the unit's gradients, at `data`, start from 0. Parameters without an element on this rank
 * (if `all`, all parameters) are marked empty, so that the micro-batch overwrites their gradients.
 * The ranges between these parameters are set to zero here. */
static void start_from_zero(ParamStore *store, int u, void *data, bool all)
{
    const UnitLayout *shape = &store->shape[u];
    size_t at = 0, first;
    for (int class = 0; class < PARAM_CLASSES; class ++)
        for (int i = 0; i < shape->num_params; i++) {
            const Param p = param_stack(&shape->param[i]);
            Tensor *dw = &store->dunit[u].tensor[p.id];
            if (param_class(shape, &p) != class || p.item > 0)
                continue;
            dw->empty =
                p.region == TRAINED && (all || shard_part(&store->shard[u], &p, &first) == 0);
            if (!dw->empty)
                continue;
            zero_between(store, data, at, p.offset);
            at = p.offset + param_numel(&p);
        }
    zero_between(store, data, at, shape->numel[TRAINED]);
}

/* If gradients are summed over ranks after every micro-batch, the buffer starts from 0, except this
 * rank's slice, which starts from the sum of earlier micro-batches of the step. So the sum over
 * ranks also accumulates. */
static void begin_grads(ParamStore *store, int u, GradBuffer *s)
{
    const Tensor sum = store->shard[u].grad;
    CHECK(s->unit < 0,
          "the gradients of unit %d are not reduced yet, but the gradients of unit %d begin",
          s->unit, u);
    s->unit = u;
    transfer_wait(&s->reduce, "gradients", u);
    start_from_zero(store, u, s->elements.data, sum.empty);
    if (!sum.empty)
        device_copy(own_slice(store, u, s).data, sum.data, tensor_bytes(sum));
}

UnitTensors *fsdp_grads(ParamStore *store, int u)
{
    GradBuffer *s = store->plan[u].grads;
    if (s && store->placed && !store->sum_once && s->unit != u)
        begin_grads(store, u, s);
    return &store->dunit[u];
}

/* This rank's gradients of replicated parameters. Every tensor rank has a copy of these parameters
 * and has computed a part of their gradients' sum. */
static Tensor copied_grads(const ParamStore *store, int u)
{
    size_t first;
    const size_t n = fsdp_copied(store, u, &first);
    return n ? slice_view(&store->shard[u].slice[TRAINED], store->shard[u].grad, first, n)
             : (Tensor){ 0 };
}

void fsdp_reduce(ParamStore *store, int u, bool last)
{
    GradBuffer *s = store->plan[u].grads;
    const bool reduces = s && (last || !store->sum_once);
    const bool replicas = last && comm_group_size(RANKS_REPLICA) > 1;
    const Tensor copied = last ? copied_grads(store, u) : (Tensor){ 0 };
    if (!store->placed)
        return;
    for (int i = 0; i < NUM_PARAMS; i++)
        store->dunit[u].tensor[i].empty = false;
    store->shard[u].grad.empty = false;
    if (!store->shard[u].slice[TRAINED].count || !(reduces || replicas || copied.data))
        return;
    store->reduced = s ? &s->reduce : &store->grad_buffer[NUM_ROTATING + u].reduce;
    transfer_begin(store->reduced, QUEUE_REDUCE);
    trace_begin("reduce", u);
    watchdog_mark_together("summing gradients", u);
    if (reduces && grad_wire_has(store, u))
        grad_wire_reduce(store, u);
    else if (reduces)
        comm_reduce_scatter(store->shard[u].grad,
                            tensor_flat(s->elements, store->shape[u].numel[TRAINED]),
                            fsdp_group(store, u));
    if (reduces)
        s->unit = -1;
    if (copied.data)
        comm_all_reduce(copied, RANKS_TENSOR);
    if (replicas && grad_wire_has(store, u))
        grad_wire_sum_replicas(store, u);
    else if (replicas)
        comm_all_reduce(store->shard[u].grad, RANKS_REPLICA);
    trace_end();
    transfer_end(store->reduced);
}

void fsdp_wait_grads(ParamStore *store)
{
    if (store->reduced)
        transfer_wait(store->reduced, "gradients", -1);
}

void fsdp_empty_grads(ParamStore *store)
{
    grad_wire_begin(store);
    for (int u = 0; u < store->num_units; u++) {
        GradBuffer *s = store->plan[u].grads;
        store->shard[u].grad.empty = true;
        if (store_holds(store, u) && (!s || store->sum_once))
            start_from_zero(store, u, s ? s->elements.data : store->shard[u].grad.data, true);
    }
}

/* ---- the optimizer's states ------------------------------------------------------------------ */

/* NOTE: in DYNAMIC8, code 0 is not the value 0. With codes of 0, values are 0 only while the scale
 * is 0, too. So this writes the code of the value 0. */
static void zero_codes(Tensor t)
{
    enum { CHUNK = 1 << 20 };
    const size_t bytes = tensor_numel(t) * dtype_size(t.format.dtype);
    if (!format_is_dynamic8(t.format)) {
        device_zero(t.data, bytes);
        return;
    }
    char *codes = xmalloc(CHUNK);
    memset(codes, dynamic8_encode(0, t.format.dtype), CHUNK);
    for (size_t at = 0; at < bytes; at += CHUNK)
        device_put((char *)t.data + at, codes, bytes - at < CHUNK ? bytes - at : CHUNK);
    free(codes);
}

void store_zero_states(ParamStore *store)
{
    store->counts = (StateCounts){ 0 };
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->optimizer->num_states && store->shard[u].slice[TRAINED].count;
             i++) {
            const Tensor t = store->shard[u].state[i];
            if (tensor_numel(t) == 0)
                continue;
            zero_codes(t);
            if (t.scale)
                device_zero(t.scale,
                            tensor_bytes(t) - tensor_numel(t) * dtype_size(t.format.dtype));
        }
}

/* ---- master weights -------------------------------------------------------------------------- */

/* Every rank draws a matrix of the region QUANTIZED whole, and keeps its slice. */
static void init_base(ParamStore *store, int u, const Param *p, float cutoff, uint64_t seed,
                      uint64_t number)
{
    const Format bf16 = { BF16, 0, false };
    const Param all = param_whole(p);
    Tensor whole = tensor_at(device_alloc(param_numel(&all) * dtype_size(BF16)), bf16, all.rows,
                             all.cols),
           elements = whole;
    elements.cols = (int)param_numel(&all);
    elements.rows = 1;
    init_normal(elements, p->init_std, cutoff, seed, number);
    quantized_store(store, u, p, whole);
    device_free(whole.data);
}

/* Initializes elements of a parameter from element `first` on, with the values that they have in
 * the whole parameter. number: of the whole parameter's first element. */
static void init_part(const Param *p, Tensor part, float cutoff, uint64_t seed, uint64_t number,
                      size_t first)
{
    const size_t n = tensor_numel(part), size = dtype_size(part.format.dtype);
    size_t whole;
    for (size_t done = 0, run; done < n; done += run) {
        run = param_run(p, first + done, &whole);
        run = run < n - done ? run : n - done;
        init_normal(tensor_at((char *)part.data + done * size, part.format, 1, (int)run),
                    p->init_std, cutoff, seed, number + whole);
    }
}

enum { ADAPTERS = 0x10a }; /* seed for the initial weights of adapters */

/* Padding of units, and padding rows of the vocabulary, stay 0. */
static void init_weights(ParamStore *store, const ModelConfig *c, uint64_t seed,
                         bool adapters_alone)
{
    float cutoff = c->init_cutoff_factor > 0   ? (float)c->init_cutoff_factor
                   : c->init_fn != INIT_NORMAL ? 3
                                               : 0;
    for (int u = 0; u < store->num_units; u++) {
        const Shard *s = &store->shard[u];
        for (int i = 0; i < store->shape[u].num_params; i++) {
            Param p = store->shape[u].param[i];
            if (adapters_alone && !p.is_adapter)
                continue;
            p.rows -= p.has_padding ? p.rows - c->vocab_size : 0;
            p.stored = p.region == QUANTIZED ? p.stored : param_numel(&p);
            const uint64_t number = store->shape[u].first + p.number;
            if (p.region == QUANTIZED) {
                if (store_holds(store, u))
                    init_base(store, u, &p, cutoff, seed, number);
                continue;
            }
            size_t first, n = shard_part(s, &p, &first);
            if (n == 0)
                continue;
            Tensor part = shard_weights(s, &p, first, n);
            if (p.init_std == 0)
                init_constant(part, p.is_norm);
            else if (p.is_adapter)
                init_part(&p, part, 0, random_bits(seed, ADAPTERS), number, first);
            else
                init_part(&p, part, cutoff, seed, number, first);
        }
    }
    store_loaded(store);
}

void store_init(ParamStore *store, const ModelConfig *c, uint64_t seed)
{
    init_weights(store, c, seed, false);
}

void store_init_adapters(ParamStore *store, const ModelConfig *c, uint64_t seed)
{
    init_weights(store, c, seed, true);
}

/* Updates the scales of FP8 operands; frozen_too: also those of frozen operands. Takes the maximum
 * over ranks of each rank's scale. A scale grows with the maximum of its elements, so the largest
 * scale is the scale of the whole operand. */
static void update_scales(ParamStore *store, bool frozen_too)
{
    Tensor scales = store->scales;
    if (!frozen_too)
        scales = tensor_flat(scales, (size_t)store->trained_scales);
    if (tensor_numel(scales) == 0)
        return;
    device_zero(scales.data, tensor_bytes(scales));
    for (int u = 0; u < store->num_units; u++)
        for (const Copy *c = store->plan[u].copy;
             c < store->plan[u].copy + store->plan[u].num_copies; c++)
            if ((c->step == CAST || c->step == CAST_SLICE || (c->step == ENCODE && frozen_too)) &&
                format_is_fp8(c->to.format) && c->param->region != QUANTIZED &&
                (frozen_too || c->param->region == TRAINED))
                quantize_item_scales(c->to, c->from, c->items);
    if (store->shards * store->tensor_ranks > 1)
        comm_all_reduce_max(scales, fsdp_all(store));
}

/* One rank has the value of an element, all others have 0, so the sum is exact. */
static void update_replicated(ParamStore *store)
{
    if (tensor_numel(store->replicated) == 0)
        return;
    device_zero(store->replicated.data, tensor_bytes(store->replicated));
    for (int u = 0; u < store->num_units; u++)
        make_copies(store, u, AT_UPDATE);
    if (store->shards > 1)
        comm_all_reduce(store->replicated, RANKS_SHARD);
}

static void updated(ParamStore *store, bool frozen_too)
{
    update_scales(store, frozen_too);
    for (int u = 0; u < store->num_units && frozen_too; u++)
        make_copies(store, u, AT_LOAD);
    update_replicated(store);
    for (int u = 0; u < store->num_units; u++)
        if (store->plan[u].weights && (frozen_too || store->plan[u].lifetime != FOR_GOOD))
            store->plan[u].weights->unit = -1;
    if (store->overlaps) {
        store->updated = device_follow(QUEUE_GATHER, store->updated);
        device_queue(QUEUE_COMPUTE);
    }
}

/* Ranks without an element of the parameter call this, too, because the scale is common to all
 * ranks. */
void fsdp_encode(ParamStore *store, int u, const Param *p, Tensor master)
{
    const Tensor w = param_tensor(&store->unit[u], p);
    const Copy *c = store->plan[u].copy, *end = c + store->plan[u].num_copies;
    while (c < end && (c->step != ENCODE || c->param != p))
        c++;
    if (format_is_fp8(w.format)) {
        const Tensor scale = tensor_at(w.scale, (Format){ F32, 0, false }, 1, SCALE_FLOATS);
        device_zero(scale.data, tensor_bytes(scale));
        if (c < end)
            quantize_scale(c->to, master);
        if (store->shards * store->tensor_ranks > 1)
            comm_all_reduce_max(scale, fsdp_all(store));
    }
    if (c < end)
        quantize_codes(c->to, master);
}

void store_updated(ParamStore *store)
{
    updated(store, false);
}

void store_loaded(ParamStore *store)
{
    updated(store, true);
}
