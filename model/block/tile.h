/* A tile: a range of tokens whose MLP is computed at once. */
#pragma once
#include "model/block/linear.h"

/* The rows of a tensor of BLOCK_TENSORS (activations.h). */
ActRows tile_rows_of(int act);

/* Whether a block computes its MLP in tiles. If not, one tile has all tokens. */
bool tile_is_partial(const Stream *stream, const Acts *a);

/* A block restricted to a tile. Its tensors are the tile's rows of tensors of all tokens, and the
 * first rows of buffers that tiles share:
 *
 *     for (Tile t = { 0 }; tile_next(&t, &block);)
 *         ... t.block ... */
typedef struct {
    Block block;
    UnitTensors dw; /* backward: the first tile may overwrite gradients; later tiles add to them */
    Acts a, next;
    BackwardScratch work;
    int end; /* number of rows that are done */
} Tile;
bool tile_next(Tile *t, const Block *b);
