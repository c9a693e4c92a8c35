/* Flat units. Every rank holds whole units and updates all of them; gradients are summed over ranks once per step. */
#include "model/fsdp.h"

#include <stdlib.h>

#include "kernels/comm.h"
#include "kernels/device.h"
#include "model/error.h"

static Tensor flat(Arena *a, Format f, size_t n)
{
    CHECK(n <= INT32_MAX, "a unit of %zu elements", n);
    return n ? tensor_alloc(a, f, 1, (int)n) : (Tensor){ .format = f, .rows = 1 };
}

static void plan_unit(Fsdp *f, Arena *a, int u)
{
    const Recipe *r = &f->recipe;
    size_t n = f->shape[u].numel;
    Shard *s = &f->shard[u];
    s->first = 0;
    s->count = n;
    s->master = flat(a, r->master, n);
    s->grad = flat(a, r->grads, n);
    s->m = flat(a, r->moment1, n);
    s->v = flat(a, r->moment2, n);
    f->weights[u] = format_equal(r->operand, r->master) ? s->master.data : flat(a, r->operand, n).data;
    f->grads[u] = s->grad.data;
    f->unit[u] = unit_views(&f->shape[u], f->weights[u], r->operand);
    f->dunit[u] = unit_views(&f->shape[u], f->grads[u], r->grads);
}

void fsdp_plan(Fsdp *f, Arena *a, const ModelConfig *c, const Recipe *r, int world, int rank)
{
    (void)rank;
    int n = c->n_layers + 2;
    if (!f->shape) {
        f->num_units = n;
        f->shape = xcalloc(n, sizeof *f->shape);
        f->shard = xcalloc(n, sizeof *f->shard);
        f->weights = xcalloc(n, sizeof *f->weights);
        f->grads = xcalloc(n, sizeof *f->grads);
        f->unit = xcalloc(n, sizeof *f->unit);
        f->dunit = xcalloc(n, sizeof *f->dunit);
    }
    f->recipe = *r;
    size_t first = 0;
    for (int u = 0; u < n; u++) {
        unit_shape(&f->shape[u], c, u, world);
        f->shape[u].first = first;
        first += f->shape[u].numel;
        plan_unit(f, a, u);
    }
}

void fsdp_gather(Fsdp *f, int unit)
{
    (void)f, (void)unit;        /* whole units are always here */
}

const Unit *fsdp_acquire(Fsdp *f, int unit)
{
    return &f->unit[unit];
}

void fsdp_release(Fsdp *f, int unit)
{
    (void)f, (void)unit;
}

Unit *fsdp_grads(Fsdp *f, int unit)
{
    return &f->dunit[unit];
}

void fsdp_reduce(Fsdp *f, int unit)
{
    if (f->last_micro_batch && f->shard[unit].count)
        comm_all_reduce(f->shard[unit].grad);
}

void fsdp_zero_grads(Fsdp *f)
{
    for (int u = 0; u < f->num_units; u++)
        device_zero(f->grads[u], tensor_bytes(f->shard[u].grad));
}

void fsdp_init(Fsdp *f, const ModelConfig *c, uint64_t seed)
{
    for (int u = 0; u < f->num_units; u++) {
        const UnitShape *s = &f->shape[u];
        Unit w = unit_views(s, f->shard[u].master.data, f->recipe.master);
        for (int i = 0; i < s->num_params; i++) {
            const Param *p = &s->param[i];
            Tensor t = w.tensor[p->slot];
            if (p->init_std == 0)
                init_constant(t, 1);
            else    /* padding rows of the vocabulary stay 0 */
                init_normal(p->has_padding ? tensor_rows(t, 0, c->vocab_size) : t, p->init_std,
                            c->init_cutoff_factor * p->init_std, seed, s->first + p->offset);
        }
    }
    fsdp_updated(f);
}

void fsdp_updated(Fsdp *f)
{
    for (int u = 0; u < f->num_units; u++) {
        const Shard *s = &f->shard[u];
        if (s->count)
            quantize(tensor_at(f->weights[u], f->recipe.operand, 1, (int)s->count), s->master);
    }
}

void fsdp_free(Fsdp *f)
{
    free(f->shape), free(f->shard), free(f->weights), free(f->grads), free(f->unit), free(f->dunit);
    *f = (Fsdp){ 0 };
}
