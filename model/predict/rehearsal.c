/* Records the work that a step queues. */
#include "model/predict/rehearsal.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "model/store/offload.h"
#include "model/predict/memory.h"
#include "model/store/param_store_sizes.h"
#include "model/update/update.h"

typedef struct {
    Rehearsal *r;
    Queue queue;
    /* unit whose work is being queued; UNIT_NONE: between two units; UNIT_UPDATE: after the last
     * unit */
    int unit;
    /* first event after the work of the previous unit; it belongs to the next unit */
    int open;
} Recorder;

/* A DeviceMark in a rehearsal. Each time a mark is queued it gets a new number; this is the
 * latest. */
typedef struct {
    int number;
} Number;

static Event *add(Recorder *w, EventKind kind)
{
    Rehearsal *r = w->r;
    if (r->count == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 4096;
        r->event = xrealloc(r->event, sizeof *r->event * (size_t)r->capacity);
    }
    Event *e = &r->event[r->count++];
    *e = (Event){ .kind = kind, .queue = w->queue, .unit = w->unit };
    return e;
}

/* ---- queues ---------------------------------------------------------------------------------- */

static void use_queue(void *recorder, Queue q)
{
    ((Recorder *)recorder)->queue = q;
}

static DeviceMark *mark(void *recorder, DeviceMark *reuse)
{
    Recorder *w = recorder;
    Number *n = reuse ? (Number *)(void *)reuse : xmalloc(sizeof *n);
    n->number = w->r->marks++;
    add(w, EVENT_MARK)->mark = n->number;
    return (DeviceMark *)(void *)n;
}

static void wait_for(void *recorder, DeviceMark *m)
{
    if (m)
        add(recorder, EVENT_WAIT)->mark = ((Number *)(void *)m)->number;
}

static void unmark(void *recorder, DeviceMark *m)
{
    (void)recorder;
    free(m);
}

/* Work between two units belongs to the later unit. */
static void use_unit(void *recorder, const char *name, int unit)
{
    Recorder *w = recorder;
    if (w->unit == UNIT_UPDATE)
        return;
    if (name)
        for (; w->open < w->r->count; w->open++)
            w->r->event[w->open].unit = unit;
    w->open = w->r->count;
    w->unit = name ? unit : UNIT_NONE;
}

/* ---- operations ------------------------------------------------------------------------------ */

static double bytes_of(const Operation *o)
{
    double bytes = 0;
    for (int i = 0; i < o->count; i++)
        bytes += (double)o->access[i].bytes *
                 ((o->access[i].how & READS ? 1 : 0) + (o->access[i].how & WRITES ? 1 : 0));
    return bytes;
}

static bool copies_with_host(const Operation *o)
{
    return strcmp(o->name, "device_copy") == 0 && o->count == 2 &&
           (model_on_host(o->access[0].at) || model_on_host(o->access[1].at));
}

static void count_traffic(Recorder *w, Event *e, const Operation *o)
{
    const struct {
        const char *name;
        Sent what;
    } names[] = {
        { "comm_all_gather", SENT_GATHERS },
        { "comm_reduce_scatter", SENT_SCATTERED_SUMS },
        { "comm_all_reduce", SENT_SUMS },
        { "comm_all_reduce_max", SENT_SUMS },
        { "comm_send", SENT_MESSAGES },
        { "comm_receive", SENT_MESSAGES },
        { "comm_exchange", comm_sent_as(o->ranks) },
    };
    size_t i = 0;
    while (strcmp(names[i].name, o->name) != 0)
        CHECK(++i < sizeof names / sizeof names[0], "%s: no kind of traffic", o->name);
    /* for a reduce-scatter, count this rank's slice, which is the last operand; otherwise count the
     * first operand */
    const Access *a = &o->access[names[i].what == SENT_SCATTERED_SUMS ? o->count - 1 : 0];
    const size_t ranks = (size_t)comm_group_size(o->ranks),
                 stays = strcmp(o->name, "comm_exchange") == 0 ? a->bytes / ranks : 0;
    const size_t bytes = comm_ring_bytes(names[i].what, a->bytes - stays, (int)ranks);
    e->work = WORK_RANKS;
    e->what = names[i].what;
    e->ranks = o->ranks;
    e->neighbour = o->neighbour;
    e->receives = strcmp(o->name, "comm_receive") == 0;
    e->bytes = (double)bytes;
    w->r->sent[e->what] += e->receives ? 0 : bytes;
}

static bool record(void *recorder, const Operation *o)
{
    Recorder *w = recorder;
    if (o->count == 0)
        return false;
    Event *e = add(w, EVENT_WORK);
    e->operation = o->name;
    if (o->ranks && comm_group_size(o->ranks) > 1)
        count_traffic(w, e, o);
    else if (copies_with_host(o)) {
        e->work = WORK_HOST;
        e->bytes = (double)o->access[0].bytes;
    } else {
        e->bytes = bytes_of(o);
        e->flops = o->flops;
        e->bits = o->bits;
    }
    return false;
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Runs a training step as train.c does. */
static void step(Model *m, ParamStore *store, const Config *c, Recorder *w, int micro_batches)
{
    const size_t numel = (size_t)micro_batches * (size_t)m->text.attn.B * (size_t)m->text.T;
    int *tokens = xcalloc(numel, sizeof *tokens);
    uint8_t *begins = xcalloc(numel, sizeof *begins);
    for (size_t i = 0; i < numel; i += (size_t)m->text.T)
        begins[i] = 1;
    fsdp_empty_grads(store);
    model_zero_losses(m);
    model_micro_batches(m, store, tokens, tokens, m->text.documents ? begins : NULL, micro_batches,
                        1, (float)c->z_loss, PASS_COMPLETE);
    w->unit = UNIT_UPDATE;
    for (; w->open < w->r->count; w->open++)
        w->r->event[w->open].unit = UNIT_UPDATE;
    optimizer_grad_norm(store);
    optimizer_step(store, c, 1, 0, 1);
    w->unit = UNIT_NONE;
    w->open = w->r->count;
    free(tokens);
    free(begins);
}

int rehearsal_micro_batches(const Config *c)
{
    const int n = c->global_train_batch_size / data_ranks(&c->strategy, c->ranks) /
                  c->device_train_microbatch_size;
    return n > 0 ? n : 1;
}

static void rehearse_step(Rehearsal *r, Recorder *w, Model *m, ParamStore *store, const Config *c,
                          int micro_batches)
{
    const int marks = w->r ? w->r->marks : 0;
    const size_t host_values = comm_sent(SENT_HOST_VALUES);
    *r = (Rehearsal){ .marks = marks,
                      .pipe = store->pipe,
                      .device = (double)model_planned_bytes(m, store),
                      .host = (double)offload_host_bytes(m) +
                              (double)store_host_bytes(store, NUM_HOSTED) };
    w->r = r;
    w->open = 0;
    step(m, store, c, w, micro_batches);
    r->sent[SENT_HOST_VALUES] = comm_sent(SENT_HOST_VALUES) - host_values;
}

/* One step runs before the recorded steps, so that kept weights are in memory and marks exist. */
void rehearse(Rehearsal *r, const int *micro_batches, int count, const Config *c, int stage)
{
    static const WatchedQueues queues = { use_queue, mark, wait_for, unmark, use_unit };
    const Mesh mesh = memory_mesh(c);
    Model m;
    ParamStore store;
    Rehearsal before, after;
    memory_plan_stage(&m, &store, c, stage);
    Recorder recorder = { NULL, QUEUE_COMPUTE, UNIT_NONE, 0 };
    const Watch watch = { record, NULL, &recorder, &queues }, *other = operations_watch(&watch);
    comm_pretend(&mesh, stage * (c->ranks / pipeline_stages(&c->strategy)));
    model_rehearse(&m, &store, c);
    rehearse_step(&before, &recorder, &m, &store, c, 1);
    for (int i = 0; i < count; i++)
        rehearse_step(&r[i], &recorder, &m, &store, c, micro_batches[i]);
    after = (Rehearsal){ 0 };
    recorder.r = &after; /* records the work that the end of the rehearsal queues */
    model_rehearsed(&m, &store);
    comm_pretend(NULL, 0);
    operations_watch(other);
    rehearsal_free(&before);
    rehearsal_free(&after);
}

void rehearsal_free(Rehearsal *r)
{
    free(r->event);
    *r = (Rehearsal){ 0 };
}
