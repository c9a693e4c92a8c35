/* Plans the memory of a whole model. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

/* Measures a model: fills the sizes of `m` and `store`, and allocates their host memory. model_free
 * (model.h) frees this memory. */
void model_plan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Measures a planned model again, with the same configuration and another placement of its
 * weights. */
void model_replan(Model *m, ParamStore *store, const Config *c, ShardChoice p);

/* Places every tensor of a model in m->memory, which has m->bytes.total bytes. The model was
 * planned with the same configuration. */
void model_place_tensors(Model *m, ParamStore *store, const Config *c);

/* Number of rows for `count` tokens. FP8 operands need padding: the last token is repeated, and no
 * other token attends to the copies. */
int decode_rows(const Recipe *r, int count);

/* bytes of device memory on this rank */
size_t model_planned_bytes(const Model *m, const ParamStore *store);
