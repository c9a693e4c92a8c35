/* A tile: tokens whose MLP is computed at once. */
#pragma once
#include "model/block/linear.h"

/* Whether a block computes its MLP in tiles; if not, one tile has all tokens. */
bool tile_is_partial(const Stream *stream, const Acts *a);

/* A block restricted to a tile. Of tensors of all tokens it has the tile's rows; of buffers that
 * tiles share it has the first rows:
 *
 *     for (Tile t = { 0 }; tile_next(&t, &block);)
 *         ... t.block ... */
typedef struct {
    Block block;
    UnitTensors dw; /* backward: the first tile may overwrite gradients; later tiles add to them */
    Acts a, next;
    BackwardScratch work;
    int end; /* rows before this one are done */
} Tile;
bool tile_next(Tile *t, const Block *b);
