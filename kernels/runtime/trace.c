/* Spans are pairs of device marks, which are reused in the next step. Times are read after the
 * step, so that recording never makes the host wait. */
#include "kernels/runtime/trace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"

typedef enum { SPAN_UNIT, SPAN_OPERATION, SPAN_WAIT } SpanKind;

typedef struct {
    const char *name;
    int unit;
    Queue queue;
    SpanKind kind;
    DeviceMark *from, *to;
} Span;

static struct {
    Span *span;
    int count, made, open; /* open: the span that trace_end ends */
    int operation;         /* the span of the operation that is being queued */
    bool record, started;  /* started: true between trace_step and trace_step_end */
    long step;
    double clock; /* total milliseconds of the steps in the file */
    DeviceMark *begin, *end;
    char *path;
    int rank;
    FILE *file;
} trace;

void trace_open(const char *folder, int rank)
{
    trace.path = xasprintf("%s/trace-rank%d.json", folder, rank);
    trace.rank = rank;
}

const char *trace_queue_name(Queue q)
{
    static const char *const names[NUM_QUEUES] = { "compute", "gather", "reduce", "offload",
                                                   "fetch",   "send",   "tensor" };
    return names[q];
}

static Span *add(const char *name, int unit, SpanKind kind)
{
    if (trace.count == trace.made) {
        trace.made = trace.made ? 2 * trace.made : 256;
        trace.span = xrealloc(trace.span, sizeof *trace.span * (size_t)trace.made);
        memset(trace.span + trace.count, 0,
               sizeof *trace.span * (size_t)(trace.made - trace.count));
    }
    Span *s = &trace.span[trace.count++];
    s->name = name;
    s->unit = unit;
    s->kind = kind;
    s->queue = device_current_queue();
    s->from = device_mark(s->from);
    return s;
}

void trace_begin(const char *name, int unit)
{
    operations_unit_begin(name, unit);
    trace.open = -1;
    if (trace.started && trace.record) {
        trace.open = trace.count;
        add(name, unit, SPAN_UNIT);
    }
}

void trace_end(void)
{
    operations_unit_end();
    if (trace.started && trace.record && trace.open >= 0) {
        Span *s = &trace.span[trace.open];
        s->to = device_mark(s->to);
    }
}

void trace_wait(DeviceMark *m, const char *for_what, int unit)
{
    if (!m)
        return;
    if (!trace.started) {
        device_wait(m);
        return;
    }
    Span *s = add(for_what, unit, SPAN_WAIT);
    device_wait(m);
    s->to = device_mark(s->to);
}

const char *trace_blocked(int *unit)
{
    for (int i = 0; i < trace.count; i++) {
        const Span *s = &trace.span[i];
        if (s->kind == SPAN_WAIT && s->to && device_reached(s->from) && !device_reached(s->to)) {
            *unit = s->unit;
            return s->name;
        }
    }
    return NULL;
}

/* Operations without accesses only change settings. Traces do not record these operations. */
static bool begin_operation(void *none, const Operation *o)
{
    (void)none;
    trace.operation = trace.count;
    if (o->count > 0)
        add(o->name, -1, SPAN_OPERATION);
    return true;
}

static void end_operation(void *none, const Operation *o)
{
    (void)none;
    Span *s = &trace.span[trace.operation];
    if (o->count > 0)
        s->to = device_mark(s->to);
}

static const Watch watch = { begin_operation, end_operation, NULL };

void trace_step(long step, bool record)
{
    trace.count = 0;
    trace.step = step;
    trace.record = record;
    trace.started = true;
    trace.begin = device_mark(trace.begin);
    if (record)
        operations_watch(&watch);
}

/* ---- the file: complete events of the Trace Event Format, in microseconds
 * ---------------------- */

static void open_file(void)
{
    trace.file = fopen(trace.path, "w");
    if (!trace.file)
        die("%s: cannot write: %s", trace.path, strerror(errno));
    fprintf(trace.file,
            "[{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, \"args\": {\"name\": \"rank "
            "%d\"}}",
            trace.rank, trace.rank);
    for (int q = 0; q < NUM_QUEUES; q++)
        fprintf(trace.file,
                ",\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": %d, \"tid\": %d, \"args\": "
                "{\"name\": \"%s\"}}",
                trace.rank, q, trace_queue_name((Queue)q));
}

static void write_span(const char *category, const char *name, int unit, int queue, double from,
                       double to)
{
    fprintf(trace.file, ",\n{\"ph\": \"X\", \"cat\": \"%s\", \"name\": \"%s%s", category,
            strcmp(category, "wait") ? "" : "wait for ", name);
    if (unit >= 0)
        fprintf(trace.file, " %d", unit);
    fprintf(trace.file, "\", \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f}", trace.rank,
            queue, 1e3 * (trace.clock + from), 1e3 * (to - from));
}

static void write_step(void)
{
    if (!trace.file)
        open_file();
    char name[48];
    snprintf(name, sizeof name, "step %ld", trace.step);
    double length = device_elapsed(trace.begin, trace.end);
    write_span("step", name, -1, QUEUE_COMPUTE, 0, length);
    for (int i = 0; i < trace.count; i++) {
        const Span *s = &trace.span[i];
        write_span(s->kind == SPAN_WAIT        ? "wait"
                   : s->kind == SPAN_OPERATION ? "operation"
                   : s->queue == QUEUE_COMPUTE ? "compute"
                                               : "communication",
                   s->name, s->unit, (int)s->queue, device_elapsed(trace.begin, s->from),
                   device_elapsed(trace.begin, s->to));
    }
    trace.clock += length;
    fflush(trace.file);
}

double trace_step_end(void)
{
    double waited = 0;
    trace.end = device_mark(trace.end);
    for (int i = 0; i < trace.count; i++)
        if (trace.span[i].kind == SPAN_WAIT && trace.span[i].queue == QUEUE_COMPUTE)
            waited += device_elapsed(trace.span[i].from, trace.span[i].to);
    if (trace.record) {
        operations_watch(NULL);
        write_step();
    }
    trace.started = trace.record = false;
    return waited;
}

void trace_close(void)
{
    if (trace.file) {
        const bool spoilt = fprintf(trace.file, "]\n") < 0 || ferror(trace.file);
        if (fclose(trace.file) != 0 || spoilt)
            warn("%s: could not be written in full: %s", trace.path, strerror(errno));
    }
    for (int i = 0; i < trace.made; i++) {
        device_unmark(trace.span[i].from);
        device_unmark(trace.span[i].to);
    }
    device_unmark(trace.begin);
    device_unmark(trace.end);
    free(trace.span);
    free(trace.path);
    memset(&trace, 0, sizeof trace);
}
