#include "model/predict/timeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/shape/units.h"

/* Messages of a stage to a neighbour: their arrival times. */
typedef struct {
    double *at;
    int count, capacity, taken;
} Messages;

typedef struct {
    const Rehearsal *r;
    Topology topology;
    int *line[NUM_QUEUES]; /* [count[q]] the events of queue q, in order */
    int count[NUM_QUEUES], next[NUM_QUEUES];
    double at[NUM_QUEUES]; /* when the last event of the queue ended */
    double *mark;          /* [marks] when the mark was reached; NAN: not yet */
    /* last: TimeUse of the last work on each queue. cause [marks]: TimeUse of the last work before
     * each mark */
    TimeUse last[NUM_QUEUES], *cause;
    /* [events] for computation: seconds by which concurrent work on other queues slows it down */
    double *taken;
    Messages to[2]; /* messages to each Neighbour */
    /* busy: time in which the compute queue works */
    double use[NUM_OWNERS][NUM_USES], exposed[NUM_USES], busy;
    const ModelConfig *config;
} Stage;

static void open_stage(Stage *s, const Rehearsal *r, const Topology *topology, int stage,
                       int stages, const ModelConfig *c)
{
    *s = (Stage){ .r = r, .topology = *topology, .config = c };
    s->topology.rank = stage * (mesh_ranks(&topology->mesh) / stages);
    for (int q = 0; q < NUM_QUEUES; q++)
        s->line[q] = xmalloc(sizeof(int) * ((size_t)r->count + 1));
    /* marks of earlier steps count as reached */
    s->mark = xcalloc((size_t)r->marks + 1, sizeof *s->mark);
    s->cause = xcalloc((size_t)r->marks + 1, sizeof *s->cause);
    s->taken = xcalloc((size_t)r->count + 1, sizeof *s->taken);
    /* seconds by which work that is queued before the next computation slows down this
     * computation */
    double taken = 0;
    for (int i = 0; i < r->count; i++) {
        const Event *e = &r->event[i];
        taken += rates_taken(e, &s->topology);
        if (e->kind == EVENT_WORK && e->queue == QUEUE_COMPUTE && !e->receives) {
            s->taken[i] = taken;
            taken = 0;
        }
        s->line[e->queue][s->count[e->queue]++] = i;
        if (e->kind == EVENT_MARK)
            s->mark[e->mark] = NAN;
    }
}

static void close_stage(Stage *s)
{
    for (int q = 0; q < NUM_QUEUES; q++)
        free(s->line[q]);
    free(s->mark);
    free(s->cause);
    free(s->taken);
    free(s->to[0].at);
    free(s->to[1].at);
}

static Owner owner_of(const Stage *s, int unit)
{
    const UnitKind *k = unit >= 0 ? unit_kind(s->config, unit) : NULL;
    return unit == UNIT_UPDATE           ? OWNER_UPDATE
           : k && !unit_reads_stream(k)  ? OWNER_EMBEDDING
           : k && !unit_writes_stream(k) ? OWNER_HEAD
                                         : OWNER_BLOCKS;
}

static TimeUse use_of(const Event *e)
{
    static const TimeUse of_queue[NUM_QUEUES] = {
        [QUEUE_COMPUTE] = USE_COMPUTE, [QUEUE_GATHER] = USE_GATHER, [QUEUE_REDUCE] = USE_SUM,
        [QUEUE_OFFLOAD] = USE_HOST,    [QUEUE_FETCH] = USE_HOST,    [QUEUE_SEND] = USE_SEND,
        [QUEUE_TENSOR] = USE_TENSOR
    };
    if (e->work != WORK_RANKS || e->what == SENT_MESSAGES)
        return e->work == WORK_RANKS ? USE_SEND : of_queue[e->queue];
    if (e->ranks == RANKS_CONTEXT || e->ranks == RANKS_TENSOR)
        return e->ranks == RANKS_CONTEXT ? USE_CONTEXT : USE_TENSOR;
    return e->queue == QUEUE_COMPUTE ? USE_SUM : of_queue[e->queue];
}

/* `waits`: the queue of the mark, or the neighbour that sends the message. */
static void add_time(Stage *s, const Event *e, bool waits, double seconds)
{
    const TimeUse use = e->kind == EVENT_WAIT ? s->cause[e->mark] : use_of(e);
    if (!waits || e->queue == QUEUE_COMPUTE)
        s->use[owner_of(s, e->unit)][waits ? USE_WAITING : use] += seconds;
    if (e->queue == QUEUE_COMPUTE) {
        s->exposed[use] += seconds;
        s->busy += waits ? 0 : seconds;
    }
}

static void send(Messages *m, double at)
{
    if (m->count == m->capacity) {
        m->capacity = m->capacity ? 2 * m->capacity : 64;
        m->at = xrealloc(m->at, sizeof *m->at * (size_t)m->capacity);
    }
    m->at[m->count++] = at;
}

/* Returns when a message to stage `stage` has arrived; NAN: it was not sent yet. */
static double receive(Stage *all, int stages, int stage, int neighbour)
{
    Messages *m = &all[(stage + (neighbour == 0 ? 1 : stages - 1)) % stages].to[1 - neighbour];
    return m->taken < m->count ? m->at[m->taken++] : NAN;
}

/* Simulates the next event of a queue. Returns false if it cannot begin yet. */
static bool advance(Stage *all, int stages, int stage, int q)
{
    Stage *s = &all[stage];
    const Event *e = &s->r->event[s->line[q][s->next[q]]];
    const bool waits = e->kind == EVENT_WAIT || e->receives;
    double from = s->at[q], end = from;
    if (waits) {
        const double ready =
            e->kind == EVENT_WAIT ? s->mark[e->mark] : receive(all, stages, stage, e->neighbour);
        if (isnan(ready))
            return false;
        end = fmax(from, ready);
    } else if (e->kind == EVENT_WORK) {
        s->last[q] = use_of(e);
        end = from + rates_seconds(e, &s->topology) + s->taken[e - s->r->event];
    } else {
        s->mark[e->mark] = end;
        s->cause[e->mark] = s->last[q];
    }
    if (e->kind == EVENT_WORK && e->work == WORK_RANKS && e->what == SENT_MESSAGES && !e->receives)
        send(&s->to[e->neighbour], end);
    if (e->kind != EVENT_MARK)
        add_time(s, e, waits, end - from);
    s->at[q] = end;
    s->next[q]++;
    return true;
}

static void run(Stage *all, int stages)
{
    bool moved = true, open = true;
    while (moved) {
        moved = open = false;
        for (int stage = 0; stage < stages; stage++)
            for (int q = 0; q < NUM_QUEUES; q++) {
                while (all[stage].next[q] < all[stage].count[q] && advance(all, stages, stage, q))
                    moved = true;
                open |= all[stage].next[q] < all[stage].count[q];
            }
    }
    CHECK(!open, "a queue waits for a mark or a message that no queue makes");
}

StepTime timeline_step(const Rehearsal *r, int stages, const Topology *topology,
                       const ModelConfig *c)
{
    StepTime t = { 0 };
    Stage *all = xcalloc((size_t)stages, sizeof *all);
    for (int stage = 0; stage < stages; stage++)
        open_stage(&all[stage], &r[stage], topology, stage, stages, c);
    run(all, stages);
    for (int stage = 0; stage < stages; stage++) {
        for (int q = 0; q < NUM_QUEUES; q++)
            t.seconds = fmax(t.seconds, all[stage].at[q]);
        t.device = fmax(t.device, r[stage].device);
        t.host = fmax(t.host, r[stage].host);
        t.stage = all[stage].busy > all[t.stage].busy ? stage : t.stage;
    }
    memcpy(t.use, all[t.stage].use, sizeof t.use);
    memcpy(t.exposed, all[t.stage].exposed, sizeof t.exposed);
    for (int stage = 0; stage < stages; stage++)
        close_stage(&all[stage]);
    free(all);
    return t;
}
