/* Sums gradients over ranks as codes. */
#include "model/store/grad_wire.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/collectives.h"
#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/store/param_store_sizes.h"

/* Slices that the ranks of g exchange. Slice (i, r) has n elements and begins at element first + i *
 * item + r * rank of `values`. Each rank gets the sums of its slices (i, own), i < items. `values`
 * begins at element `base` of the unit; its first `coded` elements are sent as codes, and no others
 * are summed. added: number of ranks whose gradients are in `values`, since scales were measured. */
typedef struct {
    Ranks g;
    Tensor values;
    size_t base, coded;
    int unit, added, items;
    size_t n, first, item, rank;
} Level;

bool grad_wire_has(const ParamStore *store, int u)
{
    return store->wire != WIRE_NONE && store->shape[u].matrices > 0;
}

/* Elements `from` to `end` - 1 of a flat tensor. */
static Tensor elements(Tensor t, size_t from, size_t end)
{
    t.data = (char *)t.data + from * dtype_size(t.format.dtype);
    return tensor_flat(t, end > from ? end - from : 0);
}

/* ---- the scales of WIRE_FP8_LM --------------------------------------------------------------- */

/* The next matrix of the unit, from parameter number *i on. NULL: there is none. */
static const Param *next_matrix(const ParamStore *store, int u, int *i)
{
    const UnitLayout *shape = &store->shape[u];
    while (*i < shape->num_params &&
           (shape->param[*i].region != TRAINED || param_class(shape, &shape->param[*i]) != 0))
        ++*i;
    return *i < shape->num_params ? &shape->param[(*i)++] : NULL;
}

/* The elements of p, with padding, among elements `from` to `end` - 1 of l->values. */
static Tensor elements_of(const Level *l, const Param *p, size_t from, size_t end)
{
    const size_t first = p->offset > l->base ? p->offset - l->base : 0,
                 stop = p->offset + param_align(p->stored),
                 last = stop > l->base ? stop - l->base : 0;
    return elements(l->values, first > from ? first : from, last < end ? last : end);
}

static float *scale_of(const ParamStore *store, int number)
{
    return (float *)store->wire_scales.data + number * SCALE_FLOATS;
}

/* Sets the scale of each matrix from its maximum over the ranks of a stage and of g. */
static void measure_scales(const ParamStore *store, const Level *l)
{
    int i = 0, number = 0;
    if (store->wire != WIRE_FP8_LM)
        return;
    device_zero(store->wire_scales.data, tensor_bytes(store->wire_scales));
    for (const Param *p; (p = next_matrix(store, l->unit, &i)); number++) {
        const Tensor x = elements_of(l, p, 0, l->coded);
        Tensor y = x;
        y.format = (Format){ E4M3, 0, false };
        y.data = NULL;
        y.scale = scale_of(store, number);
        if (tensor_numel(x) > 0)
            quantize_scale(y, x);
    }
    comm_all_reduce_max(store->wire_scales, fsdp_all(store));
    if (l->g == RANKS_REPLICA)
        comm_all_reduce_max(store->wire_scales, RANKS_REPLICA);
}

static Tensor records(Tensor flat)
{
    flat.rows = (int)(tensor_numel(flat) / WIRE_VALUES);
    flat.cols = WIRE_VALUES;
    return flat;
}

/* Encodes matrix by matrix. */
static void encode_scaled(ParamStore *store, const Level *l, Tensor message, size_t from,
                          size_t end)
{
    const float mu = exp2f((float)store->counts.raised / GRAD_WIRE_STEPS);
    int i = 0, number = 0, row = 0;
    for (const Param *p; (p = next_matrix(store, l->unit, &i)); number++) {
        const Tensor x = records(elements_of(l, p, from, end));
        const WireScale s = { scale_of(store, number), (float)l->added / mu, store->wire_cut };
        if (x.rows > 0)
            wire_encode(tensor_rows(message, row, x.rows), x, store->wire, s);
        row += x.rows;
    }
    store->wire_sent += (double)row * WIRE_VALUES;
}

void grad_wire_begin(ParamStore *store)
{
    store->wire_sent = 0;
    if (store->wire == WIRE_FP8_LM)
        device_zero(store->wire_cut, sizeof *store->wire_cut);
}

void grad_wire_adapt(ParamStore *store)
{
    double values[2] = { 0, store->wire_sent };
    uint64_t cut = 0;
    if (store->wire != WIRE_FP8_LM)
        return;
    device_get(&cut, store->wire_cut, sizeof cut);
    values[0] = (double)cut;
    comm_sum_over(values, 2, RANKS_ALL);
    const long raised = store->counts.raised;
    store->counts.raised = values[0] <= GRAD_WIRE_MOST_CUT * values[1] ? raised + 1
                           : raised > GRAD_WIRE_STEPS                  ? raised - GRAD_WIRE_STEPS
                                                                       : 0;
}

/* ---- the levels ------------------------------------------------------------------------------ */

/* The elements of slice (i, r) that are sent as codes: from element *from to *end - 1. */
static void find_slice(const Level *l, int i, int r, size_t *from, size_t *end)
{
    *from = l->first + (size_t)i * l->item + (size_t)r * l->rank;
    *end = *from + l->n < l->coded ? *from + l->n : l->coded;
    *end = *end > *from ? *end : *from;
}

static void encode_slice(ParamStore *store, const Level *l, Tensor message, int i, int r)
{
    size_t from, end;
    find_slice(l, i, r, &from, &end);
    const Tensor x = records(elements(l->values, from, end));
    if (store->wire == WIRE_FP8_LM)
        encode_scaled(store, l, message, from, end);
    else if (x.rows > 0)
        wire_encode(tensor_rows(message, 0, x.rows), x, store->wire, (WireScale){ 0 });
}

/* Encodes the slices of all other ranks, and exchanges them. Returns what the other ranks have sent,
 * item by item. */
static Tensor exchange(ParamStore *store, const Level *l)
{
    const int ranks = comm_group_size(l->g), own = comm_group_rank(l->g), items = l->items,
              each = (int)(l->n / WIRE_VALUES);
    const Tensor message = wire_message(store->sent, (size_t)(items * ranks * each), store->wire),
                 received = wire_message(store->received, (size_t)(items * (ranks - 1) * each),
                                         store->wire);
    RowRange *from = xcalloc((size_t)(items * ranks), sizeof *from),
             *to = xcalloc((size_t)(items * ranks), sizeof *to);
    for (int i = 0; i < items; i++)
        for (int r = 0; r < ranks; r++) {
            const int row = (i * ranks + r) * each;
            if (r == own)
                continue;
            encode_slice(store, l, tensor_rows(message, row, each), i, r);
            from[r * items + i] = (RowRange){ row, each };
            to[r * items + i] = (RowRange){ (i * (ranks - 1) + r - (r > own)) * each, each };
        }
    comm_exchange(received, to, message, from, items, l->g);
    free(from);
    free(to);
    return received;
}

/* to: memory of the sum of one item; NULL: the sums replace this rank's slices. */
static void sum_level(ParamStore *store, const Level *l, void *to)
{
    const int ranks = comm_group_size(l->g), own = comm_group_rank(l->g),
              each = (int)(l->n / WIRE_VALUES) * (ranks - 1);
    const Tensor received = ranks > 1 ? exchange(store, l) : (Tensor){ 0 };
    for (int i = 0; i < l->items; i++) {
        size_t from, end;
        find_slice(l, i, own, &from, &end);
        const Tensor x = records(elements(l->values, from, end));
        Tensor y = x;
        y.data = to ? to : x.data;
        if (x.rows > 0 && ranks > 1)
            wire_sum(y, x, tensor_rows(received, i * each, each), ranks, own, store->wire);
        else if (x.rows > 0 && to)
            device_copy(y.data, x.data, tensor_bytes(x));
    }
}

void grad_wire_reduce(ParamStore *store, int u)
{
    const UnitLayout *shape = &store->shape[u];
    const Slice *own = &store->shard[u].slice[TRAINED];
    const Tensor grad = store->shard[u].grad,
                 all = tensor_flat(store->plan[u].grads->elements, shape->numel[TRAINED]),
                 others = elements(all, shape->matrices, shape->numel[TRAINED]);
    const int hosts = comm_group_size(RANKS_HOSTS), near = comm_group_size(comm_near());
    const size_t n = own->count, end = own->first + n,
                 rest = shape->matrices > own->first ? shape->matrices : own->first;
    const Level inside = { .g = comm_near(),
                           .values = all,
                           .coded = shape->matrices,
                           .unit = u,
                           .added = 1,
                           .items = hosts,
                           .n = n,
                           .item = (size_t)near * n,
                           .rank = n };
    Level between = inside;
    between.g = RANKS_HOSTS;
    between.added = near;
    between.items = 1;
    between.first = (size_t)comm_group_rank(comm_near()) * n;
    between.rank = (size_t)near * n;
    if (tensor_numel(others) > 0)
        comm_all_reduce(others, RANKS_SHARD);
    measure_scales(store, &inside);
    sum_level(store, &inside, hosts > 1 ? NULL : grad.data);
    if (hosts > 1)
        sum_level(store, &between, grad.data);
    if (rest < end)
        device_copy(elements(grad, rest - own->first, n).data, elements(all, rest, end).data,
                    (end - rest) * dtype_size(grad.format.dtype));
}

void grad_wire_sum_replicas(ParamStore *store, int u)
{
    const Slice *own = &store->shard[u].slice[TRAINED];
    const Tensor grad = store->shard[u].grad;
    const size_t matrices = store->shape[u].matrices,
                 left = matrices > own->first ? matrices - own->first : 0,
                 coded = left < own->count ? left : own->count,
                 n = own->count / (size_t)store->replicas;
    const Tensor others = elements(grad, coded, own->count),
                 part = elements(grad, (size_t)comm_group_rank(RANKS_REPLICA) * n, own->count);
    const Level replicas = { .g = RANKS_REPLICA,
                             .values = grad,
                             .base = own->first,
                             .coded = coded,
                             .unit = u,
                             .added = 1,
                             .items = 1,
                             .n = n,
                             .rank = n };
    if (tensor_numel(others) > 0)
        comm_all_reduce(others, RANKS_REPLICA);
    measure_scales(store, &replicas);
    sum_level(store, &replicas, NULL);
    comm_all_gather(grad.data, part.data, n * dtype_size(grad.format.dtype), RANKS_REPLICA);
}

void grad_wire_place(ParamStore *store)
{
    size_t most = 0;
    int scales = 0;
    store->exchange.used = 0;
    for (int u = 0; u < store->num_units; u++) {
        const size_t n = store->plan[u].grads ? store->shape[u].numel[TRAINED]
                                              : store->shard[u].slice[TRAINED].count;
        if (!grad_wire_has(store, u))
            continue;
        most = n > most ? n : most;
        int i = 0, matrices = 0;
        while (next_matrix(store, u, &i))
            matrices++;
        scales = matrices > scales ? matrices : scales;
    }
    if (most == 0)
        return;
    const size_t bytes = most / WIRE_VALUES * wire_record_bytes(store->wire);
    store->sent = arena_alloc(&store->exchange, bytes);
    store->received = arena_alloc(&store->exchange, bytes);
    if (store->wire != WIRE_FP8_LM)
        return;
    store->wire_scales =
        tensor_alloc(&store->exchange, (Format){ F32, 0, false }, 1, scales * SCALE_FLOATS);
    store->wire_cut = arena_alloc(&store->exchange, sizeof *store->wire_cut);
}
