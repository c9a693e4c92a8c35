#include "model/block/tile.h"

#define TOKENS(name, tokens) [ACT_##name] = ROWS_##tokens,
static const ActRows rows_of[NUM_ACTS] = { BLOCK_TENSORS(TOKENS) };
#undef TOKENS

ActRows tile_rows_of(int act)
{
    return rows_of[act];
}

/* Returns the rows of t that a tile uses. `all` has the rows of all tokens, `part` the tile's rows
 * of `all`. If t is the memory of `all`, the tile uses `part`. Otherwise t is a buffer that all
 * tiles reuse, and the tile uses its first rows. An operand's scale depends only on the tile's
 * tokens, so backward computes the same scale as forward. */
static Tensor in_tile(Tensor t, Tensor all, Tensor part)
{
    if (t.data && t.data == all.data)
        return part;
    t.rows = part.rows;
    t.scale_amax = NULL;
    t.scale_reused = NULL;
    return t;
}

bool tile_is_partial(const Stream *stream, const Acts *a)
{
    return mlp_rows(stream, a->keep) < stream->rows;
}

static void cut(Tile *t, const Block *b, int first, int rows)
{
    const Tensor res = tensor_rows(b->a->mlp_res, first, rows), dres = b->work->dres;
    t->a = *b->a;
    t->next = *b->next;
    t->work = *b->work;
    t->block = (Block){ b->stream, b->w, t->block.dw, &t->a, &t->next, &t->work };
    for (int i = 0; i < NUM_ACTS; i++)
        if (rows_of[i] != ROWS_BRANCH)
            t->a.tensor[i] = in_tile(b->a->tensor[i], b->a->mlp_res, res);
    t->next.attn_res = tensor_rows(b->next->attn_res, first, rows);
    if (b->stream->forward_only)
        return;
    t->work.dres = tensor_rows(dres, first, rows);
    t->work.dres_amax = NULL;
    t->work.dy = in_tile(b->work->dy, dres, t->work.dres);
    t->work.dh = in_tile(b->work->dh, dres, t->work.dres);
}

static void use_gradients(Tile *t, const UnitTensors *dw)
{
    t->dw = *dw;
    t->block.dw = &t->dw;
    for (int i = 0; i < NUM_PARAMS && t->end > 0; i++)
        t->dw.tensor[i].empty = false;
}

bool tile_next(Tile *t, const Block *b)
{
    const int left = b->a->mlp_res.rows - t->end;
    if (left <= 0)
        return false;
    t->block = *b;
    if (b->dw)
        use_gradients(t, b->dw);
    if (tile_is_partial(b->stream, b->a))
        cut(t, b, t->end, left < b->stream->tile ? left : b->stream->tile);
    t->end += t->block.a->mlp_res.rows;
    return true;
}
