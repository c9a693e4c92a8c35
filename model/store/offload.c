/* Decides when saved activations move between device and host. */
#include "model/store/offload.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "model/shape/units.h"

/* A pass of a block. slot: the block's slot, and the slot of the next block; -1: none. */
struct BlockPass {
    int set, unit, slot[2];
    bool backward, leaves;
    /* for each of the two slots: after this pass, the save of pass `comes` is fetched into the
     * slot; -1: no save is fetched */
    int comes[2];
};

static bool saves_activations(const Model *m, int u)
{
    return unit_kind(m->text.config, u)->is_layer;
}

static bool moves(const Model *m)
{
    return m->offload.slots < m->offload.saves;
}

static Acts *acts_of(const Model *m, int set, int unit)
{
    return m->sets + (size_t)set * (size_t)unit_count(m->text.config) + unit;
}

/* ---- planning -------------------------------------------------------------------------------- */

int offload_least_slots(const Model *m)
{
    return MIN_SLOTS + (m->num_sets > 1);
}

int offload_saves(const Model *m, const ParamStore *store)
{
    int saves = 0;
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++) {
        const UnitRange units = pipeline_units(&store->pipe, m->text.config, chunk);
        const int in_flight = pipeline_in_flight(&store->pipe, chunk);
        for (int u = units.first; u < units.end; u++)
            saves += saves_activations(m, u) ? in_flight : 0;
    }
    return saves;
}

/* Returns the slot of save `number`. Some saves, spread as evenly as possible, have a slot of their
 * own; all others share the first `ring` slots. The last blocks of two consecutive sets are two
 * slots apart. */
static int slot_of(const Model *m, int set, int number, int *after)
{
    const Offload *o = &m->offload;
    const int ring = m->num_sets > 1 ? offload_least_slots(m) : o->slots;
    const int before = (int)((long)number * (o->slots - ring) / o->saves);
    if ((long)(number + 1) * (o->slots - ring) / o->saves > before)
        return ring + before;
    return (2 * set + ring * o->saves - (*after)++) % ring;
}

void offload_plan_slots(Model *m, const ParamStore *store)
{
    int number = 0;
    for (int set = 0; set < m->num_sets && moves(m); set++) {
        /* number of later blocks of this set whose saved activations share slots */
        int after = 0;
        for (int chunk = store->pipe.chunks - 1; chunk >= 0; chunk--) {
            const UnitRange units = pipeline_units(&store->pipe, m->text.config, chunk);
            const bool has_set = set < pipeline_in_flight(&store->pipe, chunk);
            for (int u = units.end - 1; u >= units.first && has_set; u--)
                if (saves_activations(m, u))
                    acts_of(m, set, u)->slot = slot_of(m, set, number++, &after);
        }
    }
}

/* ---- the order of passes --------------------------------------------------------------------- */

static void add_pass(const Model *m, BlockPass *p, UnitRange units, int set, int u, bool backward)
{
    const bool has_next = u + 1 < units.end && saves_activations(m, u + 1);
    *p = (BlockPass){ .set = set,
                      .unit = u,
                      .backward = backward,
                      .comes = { -1, -1 },
                      .slot = { acts_of(m, set, u)->slot,
                                has_next ? acts_of(m, set, u + 1)->slot : -1 } };
}

/* Lists all passes of these rows, in order; returns their number. */
static int list_passes(BlockPass *p, const Model *m, const ParamStore *store,
                       const PipelineRow *row, int rows)
{
    int n = 0;
    for (int i = 0; i < rows; i++) {
        const UnitRange units = pipeline_units(&store->pipe, m->text.config, row[i].chunk);
        const int set = row[i].micro % pipeline_in_flight(&store->pipe, row[i].chunk);
        const int first = row[i].backward && store->first_trained > units.first
                              ? store->first_trained
                              : units.first;
        for (int k = first; k < units.end; k++) {
            const int u = row[i].backward ? units.end - 1 - (k - first) : k;
            if (saves_activations(m, u))
                add_pass(m, &p[n++], units, set, u, row[i].backward);
        }
    }
    return n;
}

static bool same_save(const BlockPass *a, const BlockPass *b)
{
    return a->set == b->set && a->unit == b->unit;
}

/* Goes from the last pass to the first, because moves depend on the next pass in each slot. */
static void find_moves(BlockPass *pass, int count, const Model *m, const ParamStore *store)
{
    /* [slots] the next pass; -1: none */
    int *next = xmalloc(sizeof *next * (size_t)m->offload.slots);
    memset(next, 0xff, sizeof *next * (size_t)m->offload.slots);
    for (int i = count - 1; i >= 0; i--) {
        BlockPass *p = &pass[i];
        p->leaves = !p->backward && p->unit >= store->first_trained;
        for (int k = 0; k < 2 && p->slot[k] >= 0; k++) {
            const int n = next[p->slot[k]];
            const bool is_own = n >= 0 && pass[n].backward && pass[n].slot[0] == p->slot[k];
            if (is_own && k == 0 && !p->backward && same_save(p, &pass[n]))
                p->leaves = false;
            else if (is_own)
                p->comes[k] = n;
        }
        for (int k = 0; k < 2 && p->slot[k] >= 0; k++)
            next[p->slot[k]] = i;
    }
    free(next);
}

/* The result is malloc'ed. */
static BlockPass *passes_of(const Model *m, const ParamStore *store, const PipelineRow *row,
                            int rows, int *count)
{
    size_t most = 1;
    for (int i = 0; i < rows; i++) {
        const UnitRange units = pipeline_units(&store->pipe, m->text.config, row[i].chunk);
        most += (size_t)(units.end - units.first);
    }
    BlockPass *pass = xmalloc(sizeof *pass * most);
    *count = list_passes(pass, m, store, row, rows);
    find_moves(pass, *count, m, store);
    return pass;
}

/* Counts the saves that leave for the host at some time in a step with all its micro-batches. A
 * step with fewer micro-batches moves some of these saves, and no others. */
void offload_plan(Model *m, const ParamStore *store)
{
    Offload *o = &m->offload;
    o->host_bytes = 0;
    o->leaving = 0;
    if (!moves(m))
        return;
    PipelineRow *row =
        xmalloc(2 * (size_t)store->pipe.chunks * (size_t)store->pipe.micro_batches * sizeof *row);
    int count;
    BlockPass *pass = passes_of(m, store, row, pipeline_rows(row, &store->pipe), &count);
    for (int i = 0; i < m->num_sets * unit_count(m->text.config); i++)
        m->sets[i].on_host = false;
    for (int i = 0; i < count; i++) {
        Acts *a = acts_of(m, pass[i].set, pass[i].unit);
        if (!pass[i].leaves || a->on_host)
            continue;
        a->on_host = true;
        a->host_at = o->host_bytes;
        o->host_bytes += a->own_bytes;
        o->leaving++;
    }
    free(pass);
    free(row);
}

/* ---- memory ---------------------------------------------------------------------------------- */

size_t offload_host_bytes(const Model *m)
{
    return m->offload.host_bytes;
}

void offload_place(Model *m, void *host)
{
    Offload *o = &m->offload;
    if (!moves(m))
        return;
    o->host = host;
    o->slot = xcalloc((size_t)o->slots, sizeof *o->slot);
}

void offload_alloc(Model *m)
{
    if (moves(m))
        offload_place(m, m->offload.host_bytes
                             ? device_host_alloc(m->offload.host_bytes, "saved activations")
                             : NULL);
}

void offload_free(Model *m)
{
    Offload *o = &m->offload;
    for (int i = 0; o->slot && i < o->slots; i++) {
        transfer_free(&o->slot[i].leave);
        transfer_free(&o->slot[i].fetch);
    }
    device_host_free(o->host);
    free(o->slot);
    *o = (Offload){ 0 };
}

static char *slot_at(const Model *m, int slot)
{
    return (char *)m->memory + m->offload.at + (size_t)slot * m->offload.bytes;
}

/* ---- moving ---------------------------------------------------------------------------------- */

void offload_begin(Model *m, const ParamStore *store, const PipelineRow *row, int rows)
{
    Offload *o = &m->offload;
    o->next = 0;
    if (store->placed && moves(m))
        o->pass = passes_of(m, store, row, rows, &o->passes);
}

void offload_end(Model *m)
{
    free(m->offload.pass);
    m->offload.pass = NULL;
}

void offload_wait(Model *m)
{
    Offload *o = &m->offload;
    if (!o->pass || o->next == o->passes)
        return;
    const BlockPass *p = &o->pass[o->next];
    for (int k = 0; k < 2 && p->slot[k] >= 0; k++) {
        Slot *s = &o->slot[p->slot[k]];
        if (s->leaves)
            transfer_wait(&s->leave, "activations that leave", p->unit);
        s->leaves = false;
        if (s->comes)
            transfer_wait(&s->fetch, "activations", p->unit);
        s->comes = false;
    }
}

static void leave(Model *m, const BlockPass *p)
{
    Offload *o = &m->offload;
    Slot *s = &o->slot[p->slot[0]];
    const Acts *a = acts_of(m, p->set, p->unit);
    CHECK(a->on_host, "unit %d: saved activations have no place on the host", p->unit);
    transfer_begin(&s->leave, QUEUE_OFFLOAD);
    trace_begin("offload", p->unit);
    device_copy(o->host + a->host_at, slot_at(m, p->slot[0]), a->own_bytes);
    trace_end();
    transfer_end(&s->leave);
    s->leaves = true;
}

/* `p`: the backward pass that reads the saved activations. */
static void fetch(Model *m, const BlockPass *p)
{
    Offload *o = &m->offload;
    Slot *s = &o->slot[p->slot[0]];
    const Acts *a = acts_of(m, p->set, p->unit);
    transfer_begin(&s->fetch, QUEUE_FETCH);
    if (s->leaves)
        device_wait(s->leave.done);
    trace_begin("fetch", p->unit);
    device_copy(slot_at(m, p->slot[0]), o->host + a->host_at, a->own_bytes);
    trace_end();
    transfer_end(&s->fetch);
    s->leaves = false;
    s->comes = true;
}

void offload_moved(Model *m, int u)
{
    Offload *o = &m->offload;
    if (!o->pass || !saves_activations(m, u))
        return;
    const BlockPass *p = &o->pass[o->next++];
    CHECK(p->unit == u, "the pass of unit %d is planned, not the pass of unit %d", u, p->unit);
    if (p->leaves)
        leave(m, p);
    for (int k = 0; k < 2; k++)
        if (p->comes[k] >= 0)
            fetch(m, &o->pass[p->comes[k]]);
}
