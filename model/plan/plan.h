/* recipe + configuration -> where everything that a rank needs lies, in one allocation. Planning
 * needs no other ranks and no device: it can be done for any rank of any number. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/param_store.h"

/* What a kind of unit (units.h) asks for its buffers: (N, cols) that the unit has for itself; and
 * what the built-in kinds plan. */
typedef struct Planner Planner;
Tensor plan_own(Planner *p, Format f, int cols);

/* Memory that units share: at least this many bytes of it, or (rows, cols). */
void *plan_shared(Model *m, Buffer b, size_t bytes);
Tensor plan_shared_rows(Model *m, Buffer b, Format f, int rows, int cols);

void plan_block(Planner *p, Model *m, int unit);
void plan_head_input(Planner *p, Model *m, int unit);

/* plan.c: all buffers of units and what they share; amaxes: of the scales of FP8 operands.
 * plan_head.c: those of the head's logits and losses. */
void plan_units(Arena *arena, Arena *amaxes, Model *m, const ParamStore *store);
void plan_head(Arena *arena, Model *m, const Config *c);

/* Measures: fills the sizes of `m` and `store` and makes their host memory. model_free (model.h)
 * frees it. */
void model_plan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Measures a model that was planned, with the same configuration, in another placement. */
void model_replan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Places every tensor of a model that was planned, with the same configuration, in m->memory of
 * m->bytes.total. */
void model_place_tensors(Model *m, ParamStore *store, const Config *c);

/* Rows that `count` tokens take: those of FP8 operands are padded by repeating the last token,
 * where nothing sees it. */
int decode_rows(const Recipe *r, int count);

/* of device memory on this rank */
size_t model_planned_bytes(const Model *m, const ParamStore *store);
