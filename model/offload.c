/* Which saved activations move when. */
#include "model/offload.h"

#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "model/units.h"

static int block_of(const Model *m, int u)
{
    return u - unit_of_layer(m->config, 0);
}

static bool is_block(const Model *m, int l)
{
    return l >= 0 && l < m->L;
}

static bool leaves(const Model *m, const ParamStore *f, int l)
{
    return is_block(m, l) && l < m->L - m->offload.slots && unit_of_layer(m->config, l) >= f->first_trained;
}

static size_t host_place(const Model *m, int l)
{
    size_t at = 0;
    for (int i = 0; i < l; i++)
        at += m->acts[i].own_bytes;
    return at;
}

size_t offload_host_bytes(const Model *m)
{
    return m->offload.slots < m->L ? host_place(m, m->L - m->offload.slots) : 0;
}

void offload_rehearse(Model *m, void *host)
{
    Offload *o = &m->offload;
    if (o->slots == m->L)
        return;
    o->host = host;
    o->left = xcalloc(o->slots, sizeof *o->left);
    o->fetched = xcalloc(o->slots, sizeof *o->fetched);
}

void offload_place(Model *m)
{
    if (m->offload.slots < m->L)
        offload_rehearse(m, device_host_alloc(offload_host_bytes(m), "saved activations"));
}

void offload_free(Model *m)
{
    Offload *o = &m->offload;
    for (int i = 0; o->left && i < o->slots; i++) {
        device_unmark(o->left[i]);
        device_unmark(o->fetched[i]);
    }
    device_unmark(o->computed);
    device_host_free(o->host);
    free(o->left), free(o->fetched);
    *o = (Offload){ 0 };
}

static char *slot_of(const Model *m, int l)
{
    return (char *)m->memory + m->offload.at + (size_t)(l % m->offload.slots) * m->offload.bytes;
}

void offload_before_forward(Model *m, const ParamStore *f, int u)
{
    const int l = block_of(m, u), before = l + 1 - m->offload.slots;
    if (f->placed && is_block(m, l) && leaves(m, f, before))
        trace_wait(m->offload.left[before % m->offload.slots], "activations that leave", unit_of_layer(m->config, before));
}

void offload_after_forward(Model *m, const ParamStore *f, int u)
{
    const int l = block_of(m, u);
    Offload *o = &m->offload;
    if (!f->placed || !leaves(m, f, l))
        return;
    o->computed = device_follow(QUEUE_OFFLOAD, o->computed);
    trace_begin("offload", u);
    device_copy(o->host + host_place(m, l), slot_of(m, l), m->acts[l].own_bytes);
    trace_end();
    o->left[l % o->slots] = device_mark(o->left[l % o->slots]);
    device_queue(QUEUE_COMPUTE);
}

/* It has left: the forward pass of another block has waited for that. */
static void fetch(Model *m, int l)
{
    Offload *o = &m->offload;
    o->computed = device_follow(QUEUE_FETCH, o->computed);
    trace_begin("fetch", unit_of_layer(m->config, l));
    device_copy(slot_of(m, l), o->host + host_place(m, l), m->acts[l].own_bytes);
    trace_end();
    o->fetched[l % o->slots] = device_mark(o->fetched[l % o->slots]);
    device_queue(QUEUE_COMPUTE);
}

void offload_before_backward(Model *m, const ParamStore *f, int u)
{
    const int l = block_of(m, u), next = l + 2 - m->offload.slots;
    if (!f->placed || !is_block(m, l))
        return;
    if (leaves(m, f, next))
        fetch(m, next);
    if (leaves(m, f, l))
        trace_wait(m->offload.fetched[l % m->offload.slots], "activations", u);
}
