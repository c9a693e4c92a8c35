/* Where flat units lie, and the list of copies from what a rank owns to where it computes, which
 * fsdp.h carries out. */
#pragma once
#include "model/store/store_types.h"

/* Places one rank's part of every unit in the arena; called twice, to measure and to place. */
void store_plan(ParamStore *store, Arena *a, const Config *c, ShardChoice p);
/* between the two: allocates what store_plan measured besides `a` */
void store_alloc_gathered(ParamStore *store);
void store_free(ParamStore *store);
/* the update makes its `gather_input` */
bool store_encodes(const ParamStore *store, int unit, const Param *p);
/* The scale of a matrix of region QUANTIZED: of the operand and of stored E4M3. */
float *quantized_scale(const ParamStore *store, const Param *p);
