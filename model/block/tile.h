/* A tile: tokens whose MLP is computed at once. */
#pragma once
#include "model/shape/buffers.h"

/* Its rows of what all tokens have, and the first rows of buffers that tiles share. */
typedef struct {
    Model m;
    Acts a, next;
} Tile;

/* Whether a block computes its MLP in tiles. tile_of: that from row `first` on, of m->tile rows or
 * those that are left; all of the block without tiles. */
bool in_tiles(const Model *m, const Acts *a);
Tile tile_of(const Model *m, const Acts *a, const Acts *next, int first);
