/* Messages between stages, and which activations belong to which micro-batch. */
#include "model/stages.h"

#include <stdio.h>

#include "kernels/kernels.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog.h"
#include "model/units.h"

void stages_use_set(Model *m, int set)
{
    m->unit_acts = m->sets + (size_t)set * (size_t)unit_count(m->config);
    m->acts = m->unit_acts + unit_of_layer(m->config, 0);
}

static char *ranges_of(const Model *m, int set, int unit)
{
    return (char *)m->ranges + (size_t)set * m->range_bytes + m->range_at[unit];
}

void stages_use(Model *m, const ParamStore *f, UnitRange units, PipelineRow r)
{
    const int sets = pipeline_in_flight(&f->pipe, r.chunk), set = r.micro % sets;
    const size_t bytes = m->range_at[units.end] - m->range_at[units.first];
    stages_use_set(m, set);
    if (!r.backward && r.micro > 0 && sets > 1 && bytes > 0)
        device_copy(ranges_of(m, set, units.first), ranges_of(m, (r.micro - 1) % sets, units.first), bytes);
}

/* Planning asks what is written. */
static void receive(const Model *m, const ParamStore *f, Neighbour from, const char *what, int unit, Tensor x, const float *amax)
{
    const Pipeline *p = &f->pipe;
    char operation[64];
    if (f->placed) {
        snprintf(operation, sizeof operation, "stage %d: receiving from stage %d the %s", p->stage,
                 (p->stage + (from == NEXT_STAGE ? 1 : p->stages - 1)) % p->stages, what);
        watchdog_mark_neighbour(operation, unit);
    }
    trace_begin("receive", unit);
    comm_receive(x, from);
    if (amax)
        comm_receive(tensor_at(m->work.dres_amax, (Format){ F32, 0, false }, 1, 1), from);
    trace_end();
}

/* Planning asks what is read. */
static void send(Model *m, const ParamStore *f, Neighbour to, int unit, Tensor x, const float *amax)
{
    Outgoing *o = &m->outgoing[to];
    if (f->placed)
        trace_wait(o->left, "the message before", unit);
    device_copy(o->stream.data, x.data, tensor_bytes(x));
    if (amax)
        device_copy(o->amax.data, amax, sizeof *amax);
    if (!f->placed)
        return;
    o->ready = device_follow(QUEUE_SEND, o->ready);
    trace_begin("send", unit);
    comm_send(o->stream, to);
    if (amax)
        comm_send(o->amax, to);
    trace_end();
    o->left = device_mark(o->left);
    device_queue(QUEUE_COMPUTE);
}

void stages_receive_stream(Model *m, const ParamStore *f, UnitRange units)
{
    receive(m, f, PREVIOUS_STAGE, "input", units.first, m->unit_acts[units.first].attn_res, NULL);
}

void stages_receive_gradient(Model *m, const ParamStore *f, UnitRange units)
{
    receive(m, f, NEXT_STAGE, "output's gradient", units.end - 1, m->work.dres, m->work.dres_amax);
}

void stages_send_stream(Model *m, const ParamStore *f, UnitRange units)
{
    send(m, f, NEXT_STAGE, units.end - 1, m->unit_acts[units.end].attn_res, NULL);
}

void stages_send_gradient(Model *m, const ParamStore *f, UnitRange units)
{
    send(m, f, PREVIOUS_STAGE, units.first, m->work.dres, m->work.dres_amax);
}
