/* Reports the routers of a step. */
#pragma once
#include <jansson.h>

#include "model/run/run.h"

/* Sums the statistics of all ranks. All ranks must call this after a step's micro-batches. Returns
 * the keys of metrics.jsonl on rank 0, which the caller frees: losses of the router, mean entropy
 * of its probabilities, the largest share of an expert in its block's assignments, and the number
 * of experts without tokens. Blocks that backward does not reach are left out. detailed: also the
 * tokens of each expert, a list per block. Returns NULL on other ranks, and without experts. */
json_t *router_report(const Run *r, bool detailed);
