/* The gradient norm, and the update of the weights. */
#pragma once
#include "model/store/fsdp.h"

/* Euclidean norm of the gradients of all units, after fsdp_reduce; not finite if any gradient is
 * not. Waits. */
double optimizer_grad_norm(const ParamStore *store);

/* One update of every shard by the run's optimizer, counted in store->counts. `step` seeds
 * stochastic rounding. OLMo's parameter groups: norms and embeddings decay only if the
 * configuration says so. */
void optimizer_step(ParamStore *store, const Config *c, long step, double lr, double grad_scale);
