/* Every rank holds whole units and updates all of them; gradients are summed over ranks once per step. */
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

static Format compute_format(const Fsdp *f, const Param *p)
{
    return p->is_operand ? f->recipe.operand : f->recipe.stream;
}

/* The memory of an FP8 weight in its slot; units that share a slot have the same shapes. The scale is the unit's own. */
static Tensor slot_view(Fsdp *f, Arena *a, int u, const Param *p)
{
    int first = 1 + (u + 1) % WEIGHT_SLOTS;        /* the first block that uses this slot: 1 -> 1, 2 -> 2, 3 -> 1 */
    if (u == first)
        return operand_alloc(a, f->recipe.operand, p->rows, p->cols);
    Tensor t = f->unit[first].tensor[p->slot];
    t.scale = arena_alloc(a, 16);
    return t;
}

static void plan_unit(Fsdp *f, Arena *a, int u)
{
    const Recipe *r = &f->recipe;
    const UnitShape *shape = &f->shape[u];
    Shard *s = &f->shard[u];
    size_t n = shape->numel;
    s->first = 0;
    s->count = n;
    s->master = flat(a, r->master, n);
    s->grad = flat(a, r->grads, n);
    s->m = flat(a, r->moment1, n);
    s->v = flat(a, r->moment2, n);
    f->dunit[u] = unit_views(shape, s->grad.data, r->grads);
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        Format to = compute_format(f, p);
        f->unit[u].tensor[p->slot] = format_equal(to, r->master) ? param_view(p, s->master.data, to)
                                   : format_is_fp8(to)           ? slot_view(f, a, u, p)
                                                                 : tensor_alloc(a, to, p->rows, p->cols);
    }
}

void fsdp_plan(Fsdp *f, Arena *a, const ModelConfig *c, const Recipe *r, int world, int rank)
{
    (void)rank;
    int n = c->n_layers + 2;
    if (!f->shape) {
        f->num_units = n;
        f->shape = xcalloc(n, sizeof *f->shape);
        f->shard = xcalloc(n, sizeof *f->shard);
        f->unit = xcalloc(n, sizeof *f->unit);
        f->dunit = xcalloc(n, sizeof *f->dunit);
    }
    f->recipe = *r;
    size_t first = 0;
    for (int u = 0; u < n; u++) {
        unit_shape(&f->shape[u], c, u, world);
        f->shape[u].first = first;
        UnitShape alone;                        /* without the padding for the world size: random numbers do not depend on it */
        unit_shape(&alone, c, u, 1);
        first += alone.numel;
        plan_unit(f, a, u);
    }
}

size_t fsdp_weight_bytes(const Fsdp *f)
{
    size_t bytes = 0;
    for (int u = 0; u < f->num_units; u++)
        for (int i = 0; i < f->shape[u].num_params; i++) {
            const Param *p = &f->shape[u].param[i];
            Format to = compute_format(f, p);
            if (!format_equal(to, f->recipe.master) && (!format_is_fp8(to) || u <= WEIGHT_SLOTS))
                bytes += tensor_bytes(f->unit[u].tensor[p->slot]);
        }
    return bytes;
}

void fsdp_gather(Fsdp *f, int unit, int uses)
{
    for (int i = 0; i < f->shape[unit].num_params; i++) {
        const Param *p = &f->shape[unit].param[i];
        Tensor w = f->unit[unit].tensor[p->slot];
        if (!format_is_fp8(w.format))
            continue;
        if (!(uses & FOR_FORWARD))
            w.data = NULL;
        if (!(uses & FOR_BACKWARD))
            w.data_t = NULL;
        quantize_codes(w, param_view(p, f->shard[unit].master.data, f->recipe.master));
    }
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
        if (f->shard[u].count)
            device_zero(f->shard[u].grad.data, tensor_bytes(f->shard[u].grad));
}

void fsdp_init(Fsdp *f, const ModelConfig *c, uint64_t seed)
{
    float cutoff = c->init_cutoff_factor > 0 ? (float)c->init_cutoff_factor : c->init_fn == INIT_MITCHELL ? 3 : 0;
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
                            cutoff, seed, s->first + p->offset);
        }
    }
    fsdp_updated(f);
}

void fsdp_updated(Fsdp *f)
{
    for (int u = 0; u < f->num_units; u++)
        for (int i = 0; i < f->shape[u].num_params; i++) {
            const Param *p = &f->shape[u].param[i];
            Tensor w = f->unit[u].tensor[p->slot], master = param_view(p, f->shard[u].master.data, f->recipe.master);
            if (format_is_fp8(w.format))
                quantize_scale(w, master);
            else
                quantize(w, master);
        }
}

void fsdp_free(Fsdp *f)
{
    free(f->shape), free(f->shard), free(f->unit), free(f->dunit);
    *f = (Fsdp){ 0 };
}
