/* Sums gradients over ranks as codes. */
#include "model/store/grad_wire.h"

#include <stdlib.h>

#include "kernels/collectives.h"
#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/store/param_store_sizes.h"

/* Slices that the ranks of g exchange. Slice (i, r) has n elements and begins at element first + i *
 * item + r * rank of `values`. Each rank gets the sums of its slices (i, own), i < items. The first
 * `coded` elements of `values` are sent as codes, all others are not sums. */
typedef struct {
    Ranks g;
    Tensor values;
    size_t coded;
    int items;
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

/* The elements of slice (i, r) that are sent as codes, a record in each row. */
static Tensor slice_of(const Level *l, int i, int r)
{
    const size_t from = l->first + (size_t)i * l->item + (size_t)r * l->rank, end = from + l->n;
    Tensor t = elements(l->values, from, end < l->coded ? end : l->coded);
    t.rows = (int)(tensor_numel(t) / WIRE_VALUES);
    t.cols = WIRE_VALUES;
    return t;
}

/* Encodes the slices of all other ranks, and exchanges them. Returns what the other ranks have sent,
 * item by item. */
static Tensor exchange(const ParamStore *store, const Level *l)
{
    const int ranks = comm_group_size(l->g), own = comm_group_rank(l->g), items = l->items,
              records = (int)(l->n / WIRE_VALUES);
    const Tensor message =
                     wire_message(store->sent, (size_t)(items * ranks * records), store->wire),
                 received = wire_message(store->received, (size_t)(items * (ranks - 1) * records),
                                         store->wire);
    RowRange *from = xcalloc((size_t)(items * ranks), sizeof *from),
             *to = xcalloc((size_t)(items * ranks), sizeof *to);
    for (int i = 0; i < items; i++)
        for (int r = 0; r < ranks; r++) {
            const Tensor x = slice_of(l, i, r);
            const int row = (i * ranks + r) * records;
            if (r == own)
                continue;
            if (x.rows > 0)
                wire_encode(tensor_rows(message, row, x.rows), x, store->wire, (WireScale){ 0 });
            from[r * items + i] = (RowRange){ row, records };
            to[r * items + i] =
                (RowRange){ (i * (ranks - 1) + r - (r > own)) * records, records };
        }
    comm_exchange(received, to, message, from, items, l->g);
    free(from);
    free(to);
    return received;
}

/* to: memory of the sum of one item; NULL: the sums replace this rank's slices. */
static void sum_level(const ParamStore *store, const Level *l, void *to)
{
    const int ranks = comm_group_size(l->g), own = comm_group_rank(l->g),
              each = (int)(l->n / WIRE_VALUES) * (ranks - 1);
    const Tensor received = ranks > 1 ? exchange(store, l) : (Tensor){ 0 };
    for (int i = 0; i < l->items; i++) {
        const Tensor x = slice_of(l, i, own);
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
                 all = tensor_flat(store->plan[u].grads->elements, shape->numel[TRAINED]);
    const int hosts = comm_group_size(RANKS_HOSTS);
    const size_t near = (size_t)comm_group_size(comm_near()), end = own->first + own->count,
                 coded = shape->matrices, n = own->count, rest = coded > own->first ? coded : own->first;
    const Tensor others = elements(all, coded, shape->numel[TRAINED]);
    if (tensor_numel(others) > 0)
        comm_all_reduce(others, RANKS_SHARD);
    const Level inside = { comm_near(), all, coded, hosts, n, 0, near * n, n },
                between = { RANKS_HOSTS, all, coded, 1, n, (size_t)comm_group_rank(comm_near()) * n,
                            0,           near * n };
    sum_level(store, &inside, hosts > 1 ? NULL : grad.data);
    if (hosts > 1)
        sum_level(store, &between, grad.data);
    if (rest < end)
        device_copy(elements(grad, rest - own->first, n).data, elements(all, rest, end).data,
                    tensor_bytes(elements(all, rest, end)));
}

void grad_wire_sum_replicas(ParamStore *store, int u)
{
    const Slice *own = &store->shard[u].slice[TRAINED];
    const Tensor grad = store->shard[u].grad;
    const size_t matrices = store->shape[u].matrices,
                 left = matrices > own->first ? matrices - own->first : 0,
                 coded = left < own->count ? left : own->count,
                 n = own->count / (size_t)comm_group_size(RANKS_REPLICA);
    const Tensor others = elements(grad, coded, own->count);
    if (tensor_numel(others) > 0)
        comm_all_reduce(others, RANKS_REPLICA);
    const Level replicas = { RANKS_REPLICA, grad, coded, 1, n, 0, 0, n };
    sum_level(store, &replicas, NULL);
    const Tensor part = elements(grad, (size_t)comm_group_rank(RANKS_REPLICA) * n, own->count);
    comm_all_gather(grad.data, part.data, n * dtype_size(grad.format.dtype), RANKS_REPLICA);
}

void grad_wire_place(ParamStore *store)
{
    size_t most = 0;
    store->exchange.used = 0;
    for (int u = 0; u < store->num_units; u++) {
        const size_t n = store->plan[u].grads ? store->shape[u].numel[TRAINED]
                                              : store->shard[u].slice[TRAINED].count;
        if (grad_wire_has(store, u) && n > most)
            most = n;
    }
    if (most == 0)
        return;
    const size_t bytes = most / WIRE_VALUES * wire_record_bytes(store->wire);
    store->sent = arena_alloc(&store->exchange, bytes);
    store->received = arena_alloc(&store->exchange, bytes);
}
