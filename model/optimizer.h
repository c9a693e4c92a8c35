/* What happens between two batches: learning rate, clipping, AdamW. */
#pragma once
#include "model/fsdp.h"

/* A run's length, derived from max_duration. */
typedef struct { long steps, tokens; } RunLength;

/* `step` counts from 1; `tokens` are those seen when the step is done. */
double schedule_lr           (const Config *c, RunLength length, long step, long tokens);
double schedule_max_grad_norm(const Config *c, long step, long tokens);    /* 0: no clipping */

/* Euclidean norm of the gradients of all units, after fsdp_reduce; not finite if any gradient is not. Waits. */
double optimizer_grad_norm(const Fsdp *f);

/* One AdamW update of every shard. `update` counts the updates made, this one included; `step` seeds the random rounding.
 * OLMo's parameter groups: norms and embeddings decay only if the config says so. */
void   optimizer_step(Fsdp *f, const Config *c, long step, long update, double lr, double grad_scale);
