/* Records the operations of a micro-batch and computes lifetimes of buffers from them. */
#include "model/lifetimes.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "model/parallel/context.h"
#include "model/block/head.h"
#include "model/parallel/tensor_ranks.h"

/* ---- recording ------------------------------------------------------------------------------- */

/* Use of bytes [from, to) of a buffer by an operation. */
typedef struct {
    const char *operation;
    int number; /* index of the operation */
    Buffer buffer;
    size_t from, to;
    unsigned how;
    Queue queue;
} Touch;

typedef struct {
    const Model *model;
    Touch *touch; /* in the order of the operations */
    int count, capacity, operations;
    int seen; /* the first touch that no observer has seen */
    Queue queue;
    /* [queue] the compute queue has waited for all touches of this queue before this number */
    int waited[NUM_QUEUES];
} Record;

/* A mark of a queue: when it is reached, the queue's touches before `end` are done. */
typedef struct {
    Queue queue;
    int end;
} Reached;

/* Distance between buffers: larger than any buffer and than the rest of the plan, even for a
 * micro-batch that does not fit. */
static const size_t WINDOW = (size_t)1 << 56;

void lifetimes_separate(OverlaidBuffer *s)
{
    for (Buffer b = 0; b < NUM_BUFFERS; b++)
        s[b].at = (b + 1) * WINDOW;
}

static void add(Record *r, Touch t)
{
    if (r->count == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 1024;
        r->touch = xrealloc(r->touch, sizeof *r->touch * (size_t)r->capacity);
    }
    r->touch[r->count++] = t;
}

static bool record(void *recorder, const Operation *o)
{
    Record *r = recorder;
    for (int i = 0; i < o->count; i++) {
        const size_t at = (size_t)((uintptr_t)o->access[i].at - (uintptr_t)r->model->shared_memory),
                     window = at / WINDOW;
        if (window >= 1 && window <= NUM_BUFFERS)
            add(r, (Touch){ o->name, r->operations, (Buffer)(window - 1), at % WINDOW,
                            at % WINDOW + o->access[i].bytes, o->access[i].how, r->queue });
    }
    r->operations++;
    return false;
}

static void use_queue(void *recorder, Queue q)
{
    ((Record *)recorder)->queue = q;
}

static DeviceMark *mark(void *recorder, DeviceMark *reuse)
{
    const Record *r = recorder;
    Reached *m = reuse ? (Reached *)(void *)reuse : xmalloc(sizeof *m);
    *m = (Reached){ r->queue, r->count };
    return (DeviceMark *)(void *)m;
}

/* Until the compute queue waits for another queue, that queue may still read and write the buffers
 * it touches. So the wait counts as a read of these buffers. */
static void wait_for(void *recorder, DeviceMark *mark)
{
    Record *r = recorder;
    const Reached *m = (const Reached *)(const void *)mark;
    if (!m || r->queue != QUEUE_COMPUTE || m->queue == QUEUE_COMPUTE)
        return;
    for (int i = r->waited[m->queue]; i < m->end; i++)
        if (r->touch[i].queue == m->queue) {
            Touch t = r->touch[i];
            t.number = r->operations;
            t.how = READS;
            t.queue = QUEUE_COMPUTE;
            add(r, t);
        }
    r->waited[m->queue] = m->end > r->waited[m->queue] ? m->end : r->waited[m->queue];
    r->operations++;
}

static void unmark(void *recorder, DeviceMark *mark)
{
    (void)recorder;
    free(mark);
}

static void use_unit(void *recorder, const char *name, int unit)
{
    (void)recorder, (void)name, (void)unit;
}

/* An observer may read everything that a block has written. */
static void record_observer(void *recorder, int unit, const UnitTensors *w)
{
    (void)unit, (void)w;
    Record *r = recorder;
    for (int i = r->seen, end = r->count; i < end; i++)
        if (r->touch[i].how & WRITES) {
            Touch t = r->touch[i];
            t.operation = "an observer";
            t.number = r->operations;
            t.how = READS;
            t.queue = r->queue;
            add(r, t);
        }
    r->operations++;
    r->seen = r->count;
}

/* Calls all code that may use the shared memory: logits of some rows (decode.h, run/samples.c), an
 * evaluation, a training step. */
static void run(Model *m, ParamStore *store)
{
    pass_forward(m, store);
    if (m->has_head) {
        head_logits(m, store, 0);
        head_logits(m, store, m->text.N - 1);
    }
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++) {
        pass_row(m, store, (PipelineRow){ false, 0, chunk }, 1, 0, PASS_FORWARD);
        if (m->text.forward_only)
            continue;
        pass_row(m, store, (PipelineRow){ false, 0, chunk }, 1, 0, PASS_COMPLETE);
        pass_row(m, store, (PipelineRow){ true, 0, chunk }, 1, 0, PASS_COMPLETE);
    }
}

/* ---- lifetimes ------------------------------------------------------------------------------- */

/* Ranges of a buffer that are read later. Ranges do not overlap. */
typedef struct {
    struct {
        size_t from, to;
    } *range;
    int count, capacity;
} Wanted;

static void append(Wanted *w, size_t from, size_t to)
{
    if (w->count > 0 && w->range[w->count - 1].from == to) {
        w->range[w->count - 1].from = from;
        return;
    }
    if (w->count == w->capacity) {
        w->capacity = w->capacity ? 2 * w->capacity : 4;
        w->range = xrealloc(w->range, sizeof *w->range * (size_t)w->capacity);
    }
    w->range[w->count].from = from;
    w->range[w->count++].to = to;
}

static void exclude(Wanted *w, size_t from, size_t to)
{
    for (int i = w->count - 1; i >= 0; i--) {
        const size_t begin = w->range[i].from, end = w->range[i].to;
        if (end <= from || to <= begin)
            continue;
        w->range[i] = w->range[--w->count];
        if (begin < from)
            append(w, begin, from);
        if (to < end)
            append(w, to, end);
    }
}

static void include(Wanted *w, size_t from, size_t to)
{
    exclude(w, from, to);
    append(w, from, to);
}

static _Noreturn void die_of_unwritten(const Record *r, Buffer b, const Wanted *w)
{
    const Touch *t = r->touch;
    while (t->buffer != b || !(t->how & READS) || t->from >= w->range[0].to ||
           w->range[0].from >= t->to)
        t++;
    die("%s reads bytes %zu to %zu of %s; no operation before it writes bytes %zu to %zu",
        t->operation, t->from, t->to, buffer_name(b), w->range[0].from, w->range[0].to);
}

/* Records that the buffers in `held` are live at the same time. */
static void meet(Model *m, const BufferSet *held)
{
    size_t bytes = 0;
    for (Buffer b = 0; b < NUM_BUFFERS; b++)
        if (buffers_have(held, b)) {
            buffers_add(&m->shared[b].meets, held);
            bytes += m->shared[b].bytes;
        }
    m->shared_least = bytes > m->shared_least ? bytes : m->shared_least;
}

/* Liveness analysis, from the last operation to the first: bytes are wanted from a read back to the
 * write before it. */
static void follow(const Record *r, Model *m, Wanted *wanted)
{
    BufferSet held = { 0 };
    for (int i = r->count, first; i > 0; i = first) {
        first = i - 1;
        while (first > 0 && r->touch[first - 1].number == r->touch[i - 1].number)
            first--;
        BufferSet here = held; /* buffers that are live after the operation, or that it touches */
        for (int j = first; j < i; j++) {
            buffers_set(&here, r->touch[j].buffer, true);
            if (r->touch[j].how & WRITES)
                exclude(&wanted[r->touch[j].buffer], r->touch[j].from, r->touch[j].to);
        }
        for (int j = first; j < i; j++) {
            const Touch *t = &r->touch[j];
            if (t->how & READS)
                include(&wanted[t->buffer], t->from, t->to);
            buffers_set(&held, t->buffer, wanted[t->buffer].count > 0);
        }
        meet(m, &here);
    }
}

void lifetimes_record(Model *m, ParamStore *store)
{
    static const WatchedQueues queues = { use_queue, mark, wait_for, unmark, use_unit };
    Record r = { .model = m };
    Wanted wanted[NUM_BUFFERS] = { 0 };
    const Watch watch = { .begin = record, .watcher = &r, .queues = &queues },
                *before = operations_watch(&watch);
    m->observe = m->observed ? record_observer : NULL;
    m->observer = &r;
    context_divide_for_plan(&m->text);
    run(m, store);
    tp_unmark(&m->text);
    context_divide(&m->text);
    m->observe = NULL;
    operations_watch(before);
    for (Buffer b = 0; b < NUM_BUFFERS; b++)
        m->shared[b].meets = (BufferSet){ 0 };
    m->shared_least = 0;
    follow(&r, m, wanted);
    for (Buffer b = 0; b < NUM_BUFFERS; b++) {
        if (wanted[b].count)
            die_of_unwritten(&r, b, &wanted[b]);
        free(wanted[b].range);
    }
    free(r.touch);
}
