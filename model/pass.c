/* A micro-batch through the whole model: unit by unit to the losses, and back. */
#include "model/pass.h"

#include "kernels/runtime/trace.h"
#include "model/head.h"
#include "model/offload.h"
#include "model/units.h"

/* `saves`: for a backward pass. */
static void forward(Model *m, ParamStore *f, bool saves)
{
    for (int u = 0; u < f->num_units - 1; u++) {
        fsdp_gather(f, u, FOR_FORWARD);
        fsdp_gather_ahead(f, u + 1, FOR_FORWARD);
        const Unit *w = fsdp_acquire(f, u);
        if (saves)
            offload_before_forward(m, f, u);
        trace_begin("forward", u);
        f->shape[u].kind->forward(m, w, u);
        trace_end();
        if (m->observe)
            m->observe(m->observer, u, w);
        if (saves)
            offload_after_forward(m, f, u);
        fsdp_release(f, u);
    }
}

void pass_forward(Model *m, ParamStore *f)
{
    forward(m, f, false);
}

static int backward_uses(const Model *m, const ParamStore *f, int u)
{
    const UnitKind *k = f->shape[u].kind;
    return k->backward_uses ? k->backward_uses(m, u) : 0;
}

/* Down to the first unit that has something to train: nothing below it reads a gradient. */
static void backward(Model *m, ParamStore *f, bool last)
{
    const int head = f->num_units - 1, first = f->first_trained;
    fsdp_reduce(f, head, last);
    for (int u = head - 1; u >= first; u--) {
        const int uses = backward_uses(m, f, u), next = u > first ? backward_uses(m, f, u - 1) : 0;
        if (uses)
            fsdp_gather(f, u, uses);
        if (next)
            fsdp_gather_ahead(f, u - 1, next);
        const Unit *w = uses ? fsdp_acquire(f, u) : NULL;
        Unit *dw = fsdp_grads(f, u);
        offload_before_backward(m, f, u);
        trace_begin("backward", u);
        f->shape[u].kind->backward(m, w, dw, u, u > first);
        trace_end();
        if (uses)
            fsdp_release(f, u);
        fsdp_reduce(f, u, last);
    }
    if (last)
        fsdp_wait_grads(f);
}

void pass_run(Model *m, ParamStore *f, float scale, float z_weight, Pass pass)
{
    forward(m, f, pass != PASS_FORWARD);
    head_losses(m, f, scale, z_weight, pass != PASS_FORWARD);
    if (pass != PASS_FORWARD)
        backward(m, f, pass == PASS_COMPLETE);
}
