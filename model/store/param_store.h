/* Places the slices and buffers of all units in memory, and plans the list of copies from slices to
 * operands. fsdp.h carries the list out. */
#pragma once
#include "model/store/store_types.h"

/* Places one rank's slices of every unit in the arena. Called first to measure, then to place. */
void store_plan(ParamStore *store, Arena *a, const Config *c, ShardChoice p);
/* Between these two calls: allocates memory that is not in `a`, for gathered weights and for the
 * host. */
void store_alloc_gathered(ParamStore *store);
void store_free(ParamStore *store);
/* Whether the update encodes this parameter's operand (Slice.gather_input). */
bool store_encodes(const ParamStore *store, int unit, const Param *p);
/* The scale of a matrix of region QUANTIZED: of the operand and of stored E4M3. */
float *quantized_scale(const ParamStore *store, const Param *p);
