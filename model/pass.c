/* A micro-batch through the units of a stage: unit by unit, the last ones to the losses, and back. */
#include "model/pass.h"

#include "kernels/runtime/trace.h"
#include "model/head.h"
#include "model/offload.h"
#include "model/stages.h"
#include "model/units.h"

static void forward(Model *m, ParamStore *f, UnitRange units)
{
    for (int u = units.first; u < units.end && u < f->num_units - 1; u++) {
        fsdp_gather(f, u, FOR_FORWARD);
        if (u + 1 < units.end)
            fsdp_gather_ahead(f, u + 1, FOR_FORWARD);
        const Unit *w = fsdp_acquire(f, u);
        offload_wait(m);
        trace_begin("forward", u);
        f->shape[u].kind->forward(m, w, u);
        trace_end();
        if (m->observe)
            m->observe(m->observer, u, w);
        offload_moved(m, u);
        fsdp_release(f, u);
    }
}

/* The stream of a chunk, from the stage before and to the stage after it. */
static void forward_row(Model *m, ParamStore *f, PipelineRow r)
{
    const UnitRange units = pipeline_units(&f->pipe, m->config, r.chunk);
    stages_use(m, f, units, r);
    offload_wait(m);
    if (!pipeline_is_first(&f->pipe, r.chunk))
        stages_receive_stream(m, f, units);
    if (m->observe && units.first > 0)
        m->observe(m->observer, units.first - 1, NULL);
    forward(m, f, units);
    if (!pipeline_is_last(&f->pipe, r.chunk))
        stages_send_stream(m, f, units);
}

void pass_forward(Model *m, ParamStore *f)
{
    for (int chunk = 0; chunk < f->pipe.chunks; chunk++)
        forward_row(m, f, (PipelineRow){ false, 0, chunk });
}

static int backward_uses(const Model *m, const ParamStore *f, int u)
{
    const UnitKind *k = f->shape[u].kind;
    return k->backward_uses ? k->backward_uses(m, u) : 0;
}

/* Down to the first unit of all that has something to train: nothing below it reads a gradient. */
static void backward(Model *m, ParamStore *f, UnitRange units, bool last)
{
    const int head = f->num_units - 1, first = f->first_trained > units.first ? f->first_trained : units.first;
    int u = units.end - 1;
    m->backward_to = first;
    if (u == head) {
        fsdp_reduce(f, u--, last);
        if (f->tied && units.first > 0)         /* the embedding is another stage's; here it is the head only */
            fsdp_reduce(f, unit_of_head_matrix(m->config), last);
    }
    for (; u >= first; u--) {
        const int uses = backward_uses(m, f, u), next = u > first ? backward_uses(m, f, u - 1) : 0;
        if (uses)
            fsdp_gather(f, u, uses);
        if (next)
            fsdp_gather_ahead(f, u - 1, next);
        const Unit *w = uses ? fsdp_acquire(f, u) : NULL;
        Unit *dw = fsdp_grads(f, u);
        offload_wait(m);
        trace_begin("backward", u);
        f->shape[u].kind->backward(m, w, dw, u, u > f->first_trained);
        trace_end();
        offload_moved(m, u);
        if (uses)
            fsdp_release(f, u);
        fsdp_reduce(f, u, last);
    }
}

/* A gradient crosses to the stage of the units below where one of these is trained. */
static void backward_row(Model *m, ParamStore *f, UnitRange units, int chunk, bool last)
{
    if (!pipeline_is_last(&f->pipe, chunk) && units.end > f->first_trained)
        stages_receive_gradient(m, f, units);
    backward(m, f, units, last);
    if (!pipeline_is_first(&f->pipe, chunk) && units.first > f->first_trained)
        stages_send_gradient(m, f, units);
}

void pass_row(Model *m, ParamStore *f, PipelineRow r, float scale, float z_weight, Pass pass)
{
    if (r.backward) {
        const UnitRange units = pipeline_units(&f->pipe, m->config, r.chunk);
        stages_use(m, f, units, r);
        backward_row(m, f, units, r.chunk, pass == PASS_COMPLETE);
        return;
    }
    forward_row(m, f, r);
    if (pipeline_is_last(&f->pipe, r.chunk))
        head_losses(m, f, scale, z_weight, pass != PASS_FORWARD);
}
