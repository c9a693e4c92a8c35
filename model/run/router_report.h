/* What a step reports about its routers. */
#pragma once
#include <jansson.h>

#include "model/run/run.h"

/* Sums the statistics of all ranks, which must all call it after a step's micro-batches. Rank 0
 * gets the keys of metrics.jsonl, which the caller frees: losses of the router, mean entropy of its
 * probabilities, the largest share that an expert has of its block's assignments, the number of
 * experts without tokens. Blocks that backward does not reach are left out. detailed: the tokens of
 * each expert, too, a list per block. NULL: on other ranks, and without experts. */
json_t *router_report(const Run *r, bool detailed);
