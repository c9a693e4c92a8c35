#include "model/block/tile.h"

#define TOKENS(name, tokens) [ACT_##name] = tokens,
static const enum { BRANCH, MLP } tokens_of[NUM_ACTS] = { BLOCK_TENSORS(TOKENS) };
#undef TOKENS

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
    const Tensor res = tensor_rows(a->mlp_res, first, rows);
    for (int i = 0; i < NUM_ACTS; i++)
        if (tokens_of[i] == MLP)
            t.a.tensor[i] = in_tile(a->tensor[i], a->mlp_res, res);
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
