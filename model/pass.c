/* Runs a micro-batch through the units of a stage: forward unit by unit to the losses, then
 * backward. */
#include "model/pass.h"

#include "kernels/runtime/trace.h"
#include "model/block/head.h"
#include "model/store/offload.h"
#include "model/parallel/stages.h"
#include "model/shape/units.h"

static void forward(Model *m, ParamStore *store, UnitRange units)
{
    for (int u = units.first; u < units.end && u < store->num_units - 1; u++) {
        fsdp_gather(store, u, FOR_FORWARD);
        if (u + 1 < units.end)
            fsdp_gather_ahead(store, u + 1, FOR_FORWARD);
        const UnitTensors *w = fsdp_acquire(store, u);
        offload_wait(m);
        trace_begin("forward", u);
        store->shape[u].kind->forward(m, w, u);
        trace_end();
        if (m->observe)
            m->observe(m->observer, u, w);
        offload_moved(m, u);
        fsdp_release(store, u);
    }
}

/* Receives the stream of a chunk from the previous stage and sends it to the next stage. */
static void forward_row(Model *m, ParamStore *store, PipelineRow r)
{
    const UnitRange units = pipeline_units(&store->pipe, m->text.config, r.chunk);
    stages_use(m, store, units, r);
    offload_wait(m);
    if (!pipeline_is_first(&store->pipe, r.chunk))
        stages_receive_stream(m, store, units);
    if (m->observe && units.first > 0)
        m->observe(m->observer, units.first - 1, NULL);
    forward(m, store, units);
    if (!pipeline_is_last(&store->pipe, r.chunk))
        stages_send_stream(m, store, units);
}

void pass_forward(Model *m, ParamStore *store)
{
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++)
        forward_row(m, store, (PipelineRow){ false, 0, chunk });
}

static int backward_uses(const Model *m, const ParamStore *store, int u)
{
    const UnitKind *k = store->shape[u].kind;
    return k->backward_uses ? k->backward_uses(m, u) : 0;
}

/* Whether `other` is in first .. end - 1 and is a layer of the same kind as unit u. */
static bool is_alike(const ParamStore *store, int u, int other, int first, int end)
{
    const UnitKind *k = store->shape[u].kind;
    return other >= first && other < end && k->is_layer && store->shape[other].kind == k;
}

/* Backward runs down to the first unit of the whole model that is trained: no unit below it reads a
 * gradient. */
static void backward(Model *m, ParamStore *store, UnitRange units, bool last)
{
    const int head = store->num_units - 1,
              first = store->first_trained > units.first ? store->first_trained : units.first;
    int u = units.end - 1;
    if (u == head) {
        fsdp_reduce(store, u--, last);
        /* the embedding is on another stage; this stage uses the embedding's matrix only as the
         * head */
        if (store->tied && units.first > 0)
            fsdp_reduce(store, unit_of_head_matrix(m->text.config), last);
    }
    for (; u >= first; u--) {
        const int uses = backward_uses(m, store, u),
                  next = u > first ? backward_uses(m, store, u - 1) : 0;
        if (uses)
            fsdp_gather(store, u, uses);
        if (next)
            fsdp_gather_ahead(store, u - 1, next);
        const UnitTensors *w = uses ? fsdp_acquire(store, u) : NULL;
        UnitTensors *dw = fsdp_grads(store, u);
        offload_wait(m);
        trace_begin("backward", u);
        const BackwardStep step = { .needs_dx = u > store->first_trained,
                                    .after_layer = is_alike(store, u, u + 1, first, units.end),
                                    .before_layer = is_alike(store, u, u - 1, first, units.end) };
        store->shape[u].kind->backward(m, w, dw, u, step);
        trace_end();
        offload_moved(m, u);
        if (uses)
            fsdp_release(store, u);
        fsdp_reduce(store, u, last);
    }
}

/* The gradient is sent to the previous stage if a unit of an earlier stage is trained. */
static void backward_row(Model *m, ParamStore *store, UnitRange units, int chunk, bool last)
{
    if (!pipeline_is_last(&store->pipe, chunk) && units.end > store->first_trained)
        stages_receive_gradient(m, store, units);
    backward(m, store, units, last);
    if (!pipeline_is_first(&store->pipe, chunk) && units.first > store->first_trained)
        stages_send_gradient(m, store, units);
}

void pass_row(Model *m, ParamStore *store, PipelineRow r, float scale, float z_weight,
              PassKind pass)
{
    if (r.backward) {
        const UnitRange units = pipeline_units(&store->pipe, m->text.config, r.chunk);
        stages_use(m, store, units, r);
        backward_row(m, store, units, r.chunk, pass == PASS_COMPLETE);
        return;
    }
    forward_row(m, store, r);
    if (pipeline_is_last(&store->pipe, r.chunk))
        head_losses(m, store, scale, z_weight, pass != PASS_FORWARD);
}
