#include "model/block/tile.h"

/* t is of all tokens if it is the memory of `all`, whose rows `part` is. The scale of a tile's
 * operand is that of its own tokens: backward finds it again. */
static Tensor in_tile(Tensor t, Tensor all, Tensor part)
{
    if (t.data && t.data == all.data)
        return part;
    t.rows = part.rows;
    t.scale_amax = NULL;
    t.scale_reused = NULL;
    return t;
}

bool in_tiles(const Model *m, const Acts *a)
{
    return mlp_rows(m, a->keep) < m->rows;
}

Tile tile_of(const Model *m, const Acts *a, const Acts *next, int first)
{
    Tile t = { *m, *a, *next };
    BackwardScratch *work = &t.m.work;
    const int rows = m->N - first < m->tile ? m->N - first : m->tile;
    if (!in_tiles(m, a))
        return t;
    const Tensor res = t.a.mlp_res = tensor_rows(a->mlp_res, first, rows);
    Tensor *const own[] = {
        &t.a.mlp_x,         &t.a.mlp_h,          &t.a.mlp_branch,         &t.a.gate_up_raw,
        &t.a.gate_up_saved, &t.a.swiglu_operand, &t.a.xa[LINEAR_GATE_UP], &t.a.xa[LINEAR_DOWN],
        &t.a.dgate_up
    };
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        *own[i] = in_tile(*own[i], a->mlp_res, res);
    t.next.attn_res = tensor_rows(next->attn_res, first, rows);
    if (m->forward_only)
        return t;
    work->dres = tensor_rows(m->work.dres, first, rows);
    work->dres_amax = NULL;
    work->dy = in_tile(m->work.dy, m->work.dres, work->dres);
    work->dh = in_tile(m->work.dh, m->work.dres, work->dres);
    work->dact = in_tile(m->work.dact, m->work.dres, work->dres);
    return t;
}
