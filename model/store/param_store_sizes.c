/* Sizes and positions in a plan that param_store.c made. */
#include "model/store/param_store_sizes.h"

#include <string.h>

#include "model/shape/units.h"

static bool has_trained_operands(const UnitLayout *s)
{
    for (int i = 0; i < s->num_params; i++)
        if (s->param[i].region == TRAINED && s->param[i].is_operand)
            return true;
    return false;
}

/* Whether tensor parallelism cuts the unit. Other units are sharded over the tensor ranks, too. */
static bool is_in_parts(const ParamStore *store, int u)
{
    return store->shape[u].tensor_ranks == store->tensor_ranks;
}

Ranks fsdp_all(const ParamStore *store)
{
    return store->tensor_ranks > 1 ? RANKS_STAGE : RANKS_SHARD;
}

Ranks fsdp_group(const ParamStore *store, int u)
{
    return is_in_parts(store, u) ? RANKS_SHARD : RANKS_STAGE;
}

int fsdp_shards(const ParamStore *store, int u)
{
    return is_in_parts(store, u) ? store->shards : store->shards * store->tensor_ranks;
}

int fsdp_rank(const ParamStore *store, int u)
{
    return is_in_parts(store, u) ? store->rank
                                 : store->rank * store->tensor_ranks + store->tensor_rank;
}

size_t fsdp_copied(const ParamStore *store, int u, size_t *first)
{
    const Slice *s = &store->shard[u].slice[TRAINED];
    const size_t end = s->first + s->count, cut = store->shape[u].cut;
    *first = cut > s->first ? cut : s->first;
    return store->shape[u].tensor_ranks > 1 && *first < end ? end - *first : 0;
}

bool store_holds(const ParamStore *store, int u)
{
    return pipeline_holds(&store->pipe, store->shape[u].config, u);
}

bool store_on_host(const ParamStore *store, int u, Hosted h)
{
    const UnitLayout *s = &store->shape[u];
    if (u >= store->on_host[h] || !store_holds(store, u))
        return false;
    if (store->optimizer->orthogonalizes && h != HOST_FROZEN)
        return false;
    if (h == HOST_MOMENTS)
        return s->numel[TRAINED] > 0 && store->optimizer->num_states > 0;
    if (h == HOST_FROZEN)
        return s->kind->is_layer && s->numel[FROZEN] + s->numel[QUANTIZED] > 0;
    return s->kind->is_layer &&
           dtype_size(store->recipe.operand.dtype) < dtype_size(store->recipe.master.dtype) &&
           has_trained_operands(s);
}

size_t store_host_bytes(const ParamStore *store, Hosted h)
{
    size_t bytes = 0;
    if (h == NUM_HOSTED)
        return store->host.used;
    for (int u = 0; u < store->num_units; u++) {
        const Shard *s = &store->shard[u];
        if (!store_on_host(store, u, h))
            continue;
        if (h == HOST_FROZEN)
            bytes += tensor_bytes(s->slice[FROZEN].stored) + s->slice[QUANTIZED].count;
        else if (h == HOST_MASTER)
            bytes += tensor_bytes(s->slice[TRAINED].stored);
        for (int i = 0; h == HOST_MOMENTS && i < store->optimizer->num_states; i++)
            bytes += tensor_bytes(s->state[i]);
    }
    return bytes;
}

ShardChoice store_shard_choice(const ParamStore *store)
{
    ShardChoice p = { .shards = store->shards,
                      .rank = store->rank,
                      .sum_once = store->sum_once,
                      .replicas = store->replicas,
                      .resident = store->resident,
                      .pipe = store->pipe,
                      .tensor_ranks = store->tensor_ranks,
                      .tensor_rank = store->tensor_rank };
    memcpy(p.on_host, store->on_host, sizeof p.on_host);
    return p;
}

size_t update_bucket = 32 << 20;

/* A bucket has update_bucket elements. But if master weights are on the host, a bucket has all of
 * this rank's elements of an operand, because the operand has one scale. The last group of a state
 * may include padding after the parameter. */
size_t store_update_bucket_bytes(const ParamStore *store)
{
    size_t most = 0, first;
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            const bool master = store_on_host(store, u, HOST_MASTER),
                       moments = store_on_host(store, u, HOST_MOMENTS);
            const size_t all = param_align(shard_part(&store->shard[u], p, &first));
            const size_t n = !master && all > update_bucket ? update_bucket : all;
            Arena bucket = { 0 };
            if (p->region != TRAINED || n == 0)
                continue;
            if (master)
                tensor_alloc(&bucket, store->recipe.master, 1, (int)n);
            for (int k = 0; moments && k < store->optimizer->num_states; k++)
                tensor_alloc(&bucket, store->shard[u].state[k].format, 1, (int)n);
            most = bucket.used > most ? bucket.used : most;
        }
    return (most + 255) & ~(size_t)255;
}

size_t shard_part(const Shard *s, const Param *p, size_t *first)
{
    const Slice *slice = &s->slice[p->region];
    const size_t end = slice->first + slice->count, stop = p->offset + p->stored;
    const size_t from = p->offset > slice->first ? p->offset : slice->first,
                 to = stop < end ? stop : end;
    *first = from < to ? from - p->offset : 0;
    return from < to ? to - from : 0;
}

/* Matrices come first if only a part of the region has the state. */
void shard_divide_state(const ParamStore *store, int u, int state)
{
    Shard *s = &store->shard[u];
    const Slice *all = &s->slice[TRAINED];
    const size_t end =
        store->shape[u].matrices > all->first ? store->shape[u].matrices - all->first : 0;
    const size_t matrices = end < all->count ? end : all->count;
    const StateOf of = store->optimizer->state[state].of;
    s->before[state] = of == STATE_OF_OTHERS ? matrices : 0;
    s->after[state] = of == STATE_OF_MATRICES ? all->count - matrices : 0;
}

Slice shard_state(const Shard *s, int k)
{
    const Slice *all = &s->slice[TRAINED];
    return (Slice){ all->first + s->before[k], all->count - s->before[k] - s->after[k], s->state[k],
                    s->state[k] };
}

Tensor slice_view(const Slice *s, Tensor t, size_t first, size_t n)
{
    t.data = (char *)t.data + (first - s->first) * dtype_size(t.format.dtype);
    if (t.format.group)
        t.scale = (char *)t.scale + format_scale_bytes(t.format, first - s->first);
    t.rows = 1;
    t.cols = (int)n;
    return t;
}

Tensor shard_weights(const Shard *s, const Param *p, size_t first, size_t n)
{
    return slice_view(&s->slice[p->region], s->slice[p->region].stored, p->offset + first, n);
}

size_t store_weight_bytes(const ParamStore *store)
{
    size_t bytes = tensor_bytes(store->scales) + tensor_bytes(store->quantized_scales) +
                   tensor_bytes(store->replicated);
    for (int i = 0; i < num_buffers(store); i++) {
        const WeightBuffer *w = &store->weight_buffer[i];
        const bool transposes = w->has_transposes && !w->rotates;
        bytes += tensor_numel(w->elements) *
                     (dtype_size(w->elements.format.dtype) * w->has_rows + transposes) +
                 w->raw_bytes;
    }
    for (int u = 0; u < store->num_units; u++)
        if (store_on_host(store, u, HOST_MASTER))
            bytes += tensor_bytes(store->shard[u].slice[TRAINED].gather_input);
    return bytes;
}

size_t store_grad_bytes(const ParamStore *store)
{
    size_t bytes = 0;
    for (int u = 0; u < store->num_units; u++)
        bytes += tensor_bytes(store->shard[u].grad);
    for (int i = 0; i < num_buffers(store); i++)
        bytes +=
            tensor_numel(store->grad_buffer[i].elements) * dtype_size(store->recipe.grads.dtype);
    return bytes + store->exchange.used;
}

size_t store_state_bytes(const ParamStore *store)
{
    size_t bytes = 0;
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->optimizer->num_states; i++)
            bytes += tensor_bytes(store->shard[u].state[i]);
    return bytes;
}
