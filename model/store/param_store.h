/* Places the slices and buffers of all units in memory, and plans the list of copies from slices to
 * operands. The functions of fsdp.h make these copies. */
#pragma once
#include "model/store/store_types.h"

/* Places one rank's slices of every unit in the arena. Call it first to measure, then to place. */
void store_plan(ParamStore *store, Arena *a, const Config *c, ShardChoice p);
/* Allocates the memory outside `a`: for gathered weights, and on the host. Call it between these
 * two calls. */
void store_alloc_gathered(ParamStore *store);
void store_free(ParamStore *store);
/* Whether the update encodes this parameter's operand into Slice.gather_input. */
bool store_encodes(const ParamStore *store, int unit, const Param *p);
/* The scale of a matrix of region QUANTIZED, for the operand and for stored E4M3. */
float *quantized_scale(const ParamStore *store, const Param *p);
