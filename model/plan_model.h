/* The plan of a whole model. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

/* Measures: fills the sizes of `m` and `store` and makes their host memory. model_free (model.h)
 * frees it. */
void model_plan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Measures a model that was planned, with the same configuration, in another placement. */
void model_replan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Places every tensor of a model that was planned, with the same configuration, in m->memory of
 * m->bytes.total. */
void model_place_tensors(Model *m, ParamStore *store, const Config *c);

/* Number of rows for `count` tokens. FP8 operands need padding: the last token is repeated, and no
 * other token sees the copies. */
int decode_rows(const Recipe *r, int count);

/* bytes of device memory on this rank */
size_t model_planned_bytes(const Model *m, const ParamStore *store);
