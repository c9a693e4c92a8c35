/* Messages between stages, and the activations of each micro-batch. */
#include "model/parallel/stages.h"

#include <stdio.h>

#include "kernels/kernels.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

void stages_enter(const ParamStore *store)
{
    if (store->pipe.stages > 1)
        watchdog_set_stage(store->pipe.stage);
}

int stages_head_rank(const ParamStore *store)
{
    return comm_size() - comm_size() / store->pipe.stages;
}

void stages_use_set(Model *m, int set)
{
    m->unit_acts = m->sets + (size_t)set * (size_t)unit_count(m->text.config);
    m->acts = m->unit_acts + unit_of_layer(m->text.config, 0);
}

static char *amaxes_of(const Model *m, int set, int unit)
{
    return (char *)m->amaxes + (size_t)set * m->amax_bytes + m->amax_at[unit];
}

void stages_use(Model *m, const ParamStore *store, UnitRange units, PipelineRow r)
{
    const int sets = pipeline_in_flight(&store->pipe, r.chunk), set = r.micro % sets;
    const size_t bytes = m->amax_at[units.end] - m->amax_at[units.first];
    stages_use_set(m, set);
    if (!r.backward && r.micro > 0 && sets > 1 && bytes > 0)
        device_copy(amaxes_of(m, set, units.first), amaxes_of(m, (r.micro - 1) % sets, units.first),
                    bytes);
}

/* the memory plan asks what an operation writes */
static void receive(const Model *m, const ParamStore *store, Neighbour from, const char *what,
                    int unit, Tensor x, const float *amax)
{
    const Pipeline *p = &store->pipe;
    char operation[64];
    if (store->placed) {
        snprintf(operation, sizeof operation, "stage %d: receiving from stage %d the %s", p->stage,
                 (p->stage + (from == NEXT_STAGE ? 1 : p->stages - 1)) % p->stages, what);
        watchdog_mark_neighbour(operation, unit);
    }
    trace_begin("receive", unit);
    comm_receive(x, from);
    if (amax)
        comm_receive(tensor_at(m->text.work.dres_amax, (Format){ F32, 0, false }, 1, 1), from);
    trace_end();
}

/* the memory plan asks what an operation reads */
static void send(Model *m, const ParamStore *store, Neighbour to, int unit, Tensor x,
                 const float *amax)
{
    Outgoing *o = &m->outgoing[to];
    const Tensor stream = tensor_rows(o->stream, 0, x.rows);
    if (store->placed)
        transfer_wait(&o->message, "the previous message", unit);
    device_copy(stream.data, x.data, tensor_bytes(x));
    if (amax)
        device_copy(o->amax.data, amax, sizeof *amax);
    if (!store->placed)
        return;
    transfer_begin(&o->message, QUEUE_SEND);
    trace_begin("send", unit);
    comm_send(stream, to);
    if (amax)
        comm_send(o->amax, to);
    trace_end();
    transfer_end(&o->message);
}

void stages_receive_stream(Model *m, const ParamStore *store, UnitRange units)
{
    receive(m, store, PREVIOUS_STAGE, "input", units.first, m->unit_acts[units.first].attn_res,
            NULL);
}

void stages_receive_gradient(Model *m, const ParamStore *store, UnitRange units)
{
    receive(m, store, NEXT_STAGE, "output's gradient", units.end - 1, m->text.work.dres,
            m->text.work.dres_amax);
}

void stages_send_stream(Model *m, const ParamStore *store, UnitRange units)
{
    send(m, store, NEXT_STAGE, units.end - 1, m->unit_acts[units.end].attn_res, NULL);
}

void stages_send_gradient(Model *m, const ParamStore *store, UnitRange units)
{
    send(m, store, PREVIOUS_STAGE, units.first, m->text.work.dres, m->text.work.dres_amax);
}

/* This rank's slice of the tied embedding, which is on the first and the last stage; count 0: the
 * slice has no trained element. */
static Slice tied_slice(const ParamStore *store)
{
    const Shard *s = &store->shard[unit_of_head_matrix(store->shape->config)];
    return store->pipe.stages > 1 && store->tied ? s->slice[TRAINED] : (Slice){ 0 };
}

static size_t tied_part(const ParamStore *store)
{
    const size_t all = tied_slice(store).count;
    return all < update_bucket ? all : update_bucket;
}

size_t stages_tied_bytes(const ParamStore *store)
{
    return tied_part(store) * dtype_size(store->recipe.grads.dtype);
}

/* The first stage follows the last in the ring of stages. Each stage adds what it receives to what
 * it has sent: a sum of two numbers has the same bits in either order. */
void stages_sum_tied(ParamStore *store)
{
    const Slice s = tied_slice(store);
    const int unit = unit_of_head_matrix(store->shape->config);
    const Neighbour other = store->pipe.stage == 0 ? PREVIOUS_STAGE : NEXT_STAGE;
    Transfer sent = { 0 };
    if (s.count == 0)
        return;
    fsdp_wait_grads(store);
    trace_begin("reduce", unit);
    for (size_t at = 0, n; at < s.count; at += n) {
        n = s.count - at < tied_part(store) ? s.count - at : tied_part(store);
        const Tensor own = slice_view(&s, store->shard[unit].grad, s.first + at, n);
        const Tensor others = tensor_at(store->staging, own.format, 1, (int)n);
        watchdog_mark_neighbour("summing gradients over the first and the last stage", unit);
        transfer_begin(&sent, QUEUE_SEND);
        comm_send(own, other);
        transfer_end(&sent);
        comm_receive(others, other);
        device_wait(sent.done);
        accumulate(own, others);
    }
    trace_end();
    transfer_free(&sent);
}
