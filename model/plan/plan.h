/* recipe + configuration -> where everything that a rank needs lies, in one allocation. Planning
 * needs no other ranks and no device: it can be done for any rank of any number. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

/* What a kind of unit (units.h) asks for its buffers: (N, cols) that the unit has for itself; and
 * what the built-in kinds plan. */
typedef struct Planner Planner;
Tensor plan_own(Planner *p, Format f, int cols);

/* Memory that units share: at least this many bytes of it, or (rows, cols). */
void *plan_shared(Model *m, Buffer b, size_t bytes);
Tensor plan_shared_rows(Model *m, Buffer b, Format f, int rows, int cols);

void plan_block(Planner *p, Model *m, int unit);
void plan_head_input(Planner *p, Model *m, int unit);

/* All buffers of units and what they share; amaxes: of the scales of FP8 operands. */
void plan_units(Arena *arena, Arena *amaxes, Model *m, const ParamStore *store);
