/* The gradient norm, and the update of the weights. */
#pragma once
#include "model/store/fsdp.h"

/* Euclidean norm of the gradients of all units, after fsdp_reduce; not finite if a gradient is not
 * finite. Waits for the device. */
double optimizer_grad_norm(const ParamStore *store);

/* Updates every shard with the run's optimizer, and counts the update in store->counts. `step`
 * seeds stochastic rounding. Parameter groups are as in OLMo: norms and embeddings decay only if
 * the configuration says so. */
void optimizer_step(ParamStore *store, const Config *c, long step, double lr, double grad_scale);
