/* The gradient norm, and the optimizer's step over the shards.
 *
 * Offloaded states and master weights are copied to the device bucket by bucket and copied back,
 * while other buckets are updated:
 *
 *     fetch queue      bucket i + 1
 *     compute queue    bucket i          the optimizer, and codes of its results
 *     offload queue    bucket i - 1 */
#include "model/update/update.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/collectives.h"
#include "kernels/random.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/transfer.h"
#include "model/store/grad_wire.h"
#include "model/store/param_store_sizes.h"
#include "model/update/muon_step.h"

/* This rank's gradients for the norm. Only the first tensor rank counts replicated parameters. */
static Tensor counted_grads(const ParamStore *store, int u)
{
    const Shard *s = &store->shard[u];
    size_t first;
    const size_t copied = store->tensor_rank > 0 ? fsdp_copied(store, u, &first) : 0;
    return copied ? tensor_flat(s->grad, s->slice[TRAINED].count - copied) : s->grad;
}

/* The sum is passed from stage to stage, so it has the same bits as a sum without stages. */
static void sum_chunk(const ParamStore *store, int chunk)
{
    const Tensor sum = tensor_at(store->square_sum, (Format){ F32, 0, false }, 1, 1);
    const UnitRange units = pipeline_units(&store->pipe, store->shape->config, chunk);
    if (!pipeline_is_first(&store->pipe, chunk))
        comm_receive(sum, PREVIOUS_STAGE);
    for (int u = units.first; u < units.end; u++)
        if (store->shard[u].slice[TRAINED].count)
            sum_squares(store->square_sum, counted_grads(store, u));
    if (pipeline_is_last(&store->pipe, chunk))
        return;
    Transfer sent = { 0 };
    transfer_begin(&sent, QUEUE_SEND);
    comm_send(sum, NEXT_STAGE);
    transfer_end(&sent);
    device_wait(sent.done);
    transfer_free(&sent);
}

double optimizer_grad_norm(const ParamStore *store)
{
    float s;
    device_zero(store->square_sum, sizeof s);
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++)
        sum_chunk(store, chunk);
    device_get(&s, store->square_sum, sizeof s);
    double total = pipeline_is_last(&store->pipe, store->pipe.chunks - 1) ? s : 0;
    comm_sum_over(&total, 1, RANKS_COPY);
    return sqrt(total);
}

/* Number of elements that must stay together: the largest group of a state with a common scale. */
static size_t largest_group(const ParamStore *store, const Shard *s)
{
    size_t group = 0;
    for (int i = 0; i < store->optimizer->num_states; i++)
        group = (size_t)s->state[i].format.group > group ? (size_t)s->state[i].format.group : group;
    return group;
}

/* Elements of a parameter that this rank owns and updates at once: n elements from its `first` on,
 * which may go on in the items after `param`. Includes the padding (zeros) of a state's last
 * group. */
typedef struct {
    int unit;
    const Param *param;
    size_t first, n;
    Tensor master, state[MAX_STATES];
    bool master_on_host, states_on_host;
} UpdateBucket;

typedef struct {
    UpdateBucket *bucket;
    int count;
} Buckets;

static void add_bucket(ParamStore *store, Buckets *all, int u, const Param *p, size_t first,
                       size_t n)
{
    const Shard *s = &store->shard[u];
    const size_t at = p->offset + first;
    UpdateBucket *bucket = &all->bucket[all->count++];
    *bucket = (UpdateBucket){ .unit = u,
                              .param = p,
                              .first = first,
                              .n = n,
                              .master_on_host = store_on_host(store, u, HOST_MASTER) && n > 0,
                              .states_on_host = store_on_host(store, u, HOST_MOMENTS) && n > 0 };
    if (n == 0)
        return;
    bucket->master = slice_view(&s->slice[TRAINED], s->slice[TRAINED].stored, at, n);
    for (int k = 0; k < store->optimizer->num_states; k++) {
        const Slice own = shard_state(s, k);
        if (store->optimizer->state[k].of != (p->is_operand ? STATE_OF_OTHERS : STATE_OF_MATRICES))
            bucket->state[k] = slice_view(&own, s->state[k], at, n);
    }
}

/* Adds the buckets of a parameter. A parameter without elements on this rank also gets a bucket if
 * all ranks compute the scale of its codes together. Items whose elements are consecutive in memory
 * and in the model are updated together, unless they are fetched from the host one by one. */
static void add_buckets(ParamStore *store, Buckets *all, int u, const Param *p)
{
    const size_t group = largest_group(store, &store->shard[u]);
    const bool master = store_on_host(store, u, HOST_MASTER),
               moments = store_on_host(store, u, HOST_MOMENTS),
               joins = p->tensor_ranks == 1 && !master && !moments;
    const size_t most = moments && !master ? update_bucket : INT32_MAX / PARAM_ALIGN * PARAM_ALIGN;
    Param stored = *p;
    size_t first;
    if (joins && p->item > 0)
        return;
    if (joins)
        stored.stored *= (size_t)p->items;
    const size_t n = shard_part(&store->shard[u], &stored, &first);
    for (size_t done = 0; done < n || (n == 0 && done == 0 && store_encodes(store, u, p));
         done += most) {
        size_t count = n - done < most ? n - done : most;
        if (group)
            count = (count + group - 1) / group * group;
        all->bucket = xrealloc(all->bucket, sizeof *all->bucket * ((size_t)all->count + 1));
        add_bucket(store, all, u, p, first + done, count);
    }
}

/* Large buckets come first, in the same order on all ranks: a bucket is fetched while a bucket of
 * the same size is written back. */
static int compare_buckets(const void *x, const void *y)
{
    const UpdateBucket *a = x, *b = y;
    const size_t n = param_numel(a->param), k = param_numel(b->param);
    if (n != k)
        return n < k ? 1 : -1;
    if (a->unit != b->unit)
        return a->unit - b->unit;
    if (a->param != b->param)
        return a->param < b->param ? -1 : 1;
    return (a->first > b->first) - (a->first < b->first);
}

static Buckets list_buckets(ParamStore *store)
{
    Buckets all = { 0 };
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++)
            if (store->shape[u].param[i].region == TRAINED &&
                !muon_steps(store, &store->shape[u].param[i]))
                add_buckets(store, &all, u, &store->shape[u].param[i]);
    if (all.count > 0)
        qsort(all.bucket, (size_t)all.count, sizeof *all.bucket, compare_buckets);
    return all;
}

/* ---- what is on the host --------------------------------------------------------------------- */

static bool moves(const UpdateBucket *p)
{
    return p->master_on_host || p->states_on_host;
}

typedef enum { TO_DEVICE, TO_HOST } Direction;

static void copy(void *device, void *host, size_t bytes, Direction d)
{
    if (bytes > 0)
        device_copy(d == TO_DEVICE ? device : host, d == TO_DEVICE ? host : device, bytes);
}

/* Copies t to the next free range of the buffer; returns the tensor there. */
static Tensor copy_tensor(Arena *buffer, Tensor t, Direction d)
{
    const size_t n = tensor_numel(t), data = n * dtype_size(t.format.dtype),
                 scales = format_scale_bytes(t.format, n);
    Tensor staged = t;
    staged.data = arena_alloc(buffer, data);
    staged.scale = scales ? arena_alloc(buffer, scales) : NULL;
    copy(staged.data, t.data, data, d);
    copy(staged.scale, t.scale, scales, d);
    return staged;
}

/* The bucket as it is in its buffer, one of UPDATE_BUFFERS. */
static UpdateBucket copy_bucket(const ParamStore *store, const UpdateBucket *p, int buffer,
                                Direction d)
{
    Arena arena = { .memory =
                        (char *)store->staging + (size_t)buffer * store->update_bucket_bytes };
    UpdateBucket staged = *p;
    trace_begin(d == TO_DEVICE ? "fetch" : "offload", p->unit);
    if (p->master_on_host)
        staged.master = copy_tensor(&arena, p->master, d);
    for (int k = 0; p->states_on_host && k < store->optimizer->num_states; k++)
        staged.state[k] = copy_tensor(&arena, p->state[k], d);
    trace_end();
    CHECK(arena.used <= store->update_bucket_bytes, "a bucket of the update takes %zu bytes of %zu",
          arena.used, store->update_bucket_bytes);
    return staged;
}

/* ---- the step -------------------------------------------------------------------------------- */

static Tensor elements(Tensor t, size_t first, size_t n)
{
    return t.data ? slice_view(&(Slice){ 0 }, t, first, n) : t;
}

/* Updates the elements. Stochastic rounding needs the position of each element in the whole
 * parameter. If tensor ranks cut the columns, step.numbering gives the positions. If they cut the
 * rows, as of q, k and v, each consecutive range of the parameter gets its own step. */
static void step_runs(const ParamStore *store, StepParams step, const UpdateBucket *bucket)
{
    const Param *p = bucket->param;
    const Shard *s = &store->shard[bucket->unit];
    const bool in_rows = p->tensor_ranks > 1 && p->split == SPLIT_COLUMNS,
               at_once = in_rows || p->tensor_ranks == 1;
    if (in_rows)
        step.numbering = (Numbering){ .width = (unsigned)p->cols,
                                      .start = (unsigned)(bucket->first % (size_t)p->cols),
                                      .skip = (uint64_t)p->cols * (uint64_t)(p->tensor_ranks - 1) };
    for (size_t done = 0, n, at; done < bucket->n; done += n) {
        Tensor state[MAX_STATES];
        n = param_run(p, bucket->first + done, &at);
        n = at_once || n > bucket->n - done ? bucket->n - done : n;
        for (int k = 0; k < store->optimizer->num_states; k++)
            state[k] = elements(bucket->state[k], done, n);
        const Tensor grad =
            slice_view(&s->slice[TRAINED], s->grad, p->offset + bucket->first + done, n);
        store->optimizer->step(elements(bucket->master, done, n), state, grad, &step,
                               store->shape[bucket->unit].first + p->number + at);
    }
}

static void step_bucket(ParamStore *store, const Config *c, StepParams step,
                        const UpdateBucket *bucket)
{
    const Shard *s = &store->shard[bucket->unit];
    const Param *p = bucket->param;
    const bool decays = p->is_vector      ? c->optimizer.decay_norm_and_bias
                        : p->is_embedding ? c->optimizer.decay_embeddings
                                          : true;
    if (store->shape[bucket->unit].kind->is_projector && c->optimizer.projector_lr > 0)
        step.lr *= c->optimizer.projector_lr / c->optimizer.lr;
    step.weight_decay = decays ? c->optimizer.weight_decay : 0;
    if (bucket->n > 0)
        step_runs(store, step, bucket);
    if (store_encodes(store, bucket->unit, p)) {
        Tensor own = bucket->master;
        size_t first;
        own.cols = (int)shard_part(s, p, &first);
        fsdp_encode(store, bucket->unit, p, own);
    }
}

typedef struct {
    UpdateBucket staged[UPDATE_BUFFERS];
    /* the buffer is free when its previous bucket is on the host again */
    Transfer fetch[UPDATE_BUFFERS];
    DeviceMark *computed;
} UpdateBuffers;

/* Before the first bucket the fetch queue waits for the compute queue: the buffers share their
 * memory with activations. */
static void fetch_bucket(const ParamStore *store, UpdateBuffers *s, const UpdateBucket *p,
                         int number)
{
    const int buffer = number % UPDATE_BUFFERS;
    if (number == 0)
        s->computed = device_follow(QUEUE_FETCH, s->computed);
    transfer_start(&s->fetch[buffer], QUEUE_FETCH);
    s->staged[buffer] = copy_bucket(store, p, buffer, TO_DEVICE);
    transfer_end(&s->fetch[buffer]);
}

/* Waits until the next bucket is on the device: on the host, its first scales may share a 32-bit
 * word with this bucket's last scales. Copies still run in both directions, because the bucket
 * after the next is already being fetched. */
static void return_bucket(const ParamStore *store, UpdateBuffers *s, const UpdateBucket *p,
                          int number)
{
    const int buffer = number % UPDATE_BUFFERS;
    s->computed = device_follow(QUEUE_OFFLOAD, s->computed);
    device_wait(s->fetch[(number + 1) % UPDATE_BUFFERS].done);
    copy_bucket(store, p, buffer, TO_HOST);
    transfer_allow(&s->fetch[buffer]);
    device_queue(QUEUE_COMPUTE);
}

/* After this, queued operations find all buckets on the host again, and the buffers free. */
static void close_buffers(UpdateBuffers *s)
{
    for (int i = 0; i < UPDATE_BUFFERS; i++) {
        device_wait(s->fetch[i].allowed);
        transfer_free(&s->fetch[i]);
    }
    device_unmark(s->computed);
}

void optimizer_step(ParamStore *store, const Config *c, long step, double lr, double grad_scale)
{
    const StepParams params = { .lr = lr,
                                .beta1 = c->optimizer.beta1,
                                .beta2 = c->optimizer.beta2,
                                .eps = c->optimizer.eps,
                                .grad_scale = grad_scale,
                                .update = ++store->counts.updates,
                                .seed = random_bits(c->seed, step) };
    Buckets all = list_buckets(store);
    UpdateBuffers buffers = { 0 };
    /* number of offloaded buckets that were fetched, and that were updated */
    int fetched = 0, stepped = 0;
    for (int i = 0, ahead = 0; i < all.count; i++) {
        for (; ahead < all.count && ahead <= i + 1; ahead++)
            if (moves(&all.bucket[ahead]))
                fetch_bucket(store, &buffers, &all.bucket[ahead], fetched++);
        const UpdateBucket *p = &all.bucket[i];
        if (!moves(p)) {
            step_bucket(store, c, params, p);
            continue;
        }
        transfer_wait(&buffers.fetch[stepped % UPDATE_BUFFERS], "states", p->unit);
        step_bucket(store, c, params, &buffers.staged[stepped % UPDATE_BUFFERS]);
        return_bucket(store, &buffers, p, stepped++);
    }
    close_buffers(&buffers);
    if (store->optimizer->orthogonalizes)
        muon_step(store, c, &params);
    free(all.bucket);
    store_updated(store);
    grad_wire_adapt(store);
}
