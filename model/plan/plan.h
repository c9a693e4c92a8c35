/* Places all memory that a rank needs in one allocation, by the recipe and the configuration.
 * Planning needs neither a device nor other ranks: it can plan any rank of a run of any size. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

typedef struct Planner Planner;
/* A buffer (N, cols) that belongs to one unit. The `plan` of a unit kind (units.h) calls it. */
Tensor plan_own(Planner *p, Format f, int cols);

/* The memory of buffer b, which units share, with at least `bytes` bytes. */
void *plan_shared(Model *m, Buffer b, size_t bytes);
/* A tensor (rows, cols) in the memory of buffer b. */
Tensor plan_shared_rows(Model *m, Buffer b, Format f, int rows, int cols);

void plan_block(Planner *p, Model *m, int unit);
void plan_head_input(Planner *p, Model *m, int unit);

/* Plans the buffers of all units. amaxes: the arena that measures or places scale_amax of FP8
 * operands. */
void plan_units(Arena *arena, Arena *amaxes, Model *m, const ParamStore *store);
