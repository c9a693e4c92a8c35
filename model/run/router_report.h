/* Reports the routers of a step. */
#pragma once
#include <jansson.h>

#include "model/checkpoint/checkpoint.h"
#include "model/shape/buffers.h"

/* The sums of all ranks after a step's micro-batches: (L + 1, 2E + 3), as in RouterLosses. All
 * ranks must call this; the caller frees the sums. NULL: there are no experts. */
double *router_sums(const Stream *s);

/* Rank 0 gets the keys of metrics.jsonl, which the caller frees: losses of the router, mean entropy
 * of its probabilities, the largest share that an expert has of its block's assignments, the number
 * of experts without tokens. Blocks that backward does not reach are left out. detailed: the tokens
 * of each expert, too, a list per block. NULL: on other ranks, and without sums. */
json_t *router_report(const Stream *s, const double *sums, bool detailed);

/* Sets the model's router bias from a checkpoint. Dies if the number of values does not fit the
 * model; warns if the checkpoint has a bias and the model uses none. */
void router_load_bias(Stream *s, const TrainState *t, const char *folder);

/* After an update: bias += bias_gamma sign(mean load - load) for each expert, with the loads of the
 * step's batch on all ranks [OLMo-core, MoERouter.post_batch; Wang et al. 2024, arXiv 2408.15664,
 * algorithm 1]. Has no effect without bias_gamma. */
void router_move_bias(Stream *s, TrainState *t, const double *sums);
