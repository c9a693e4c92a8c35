/* Training with policy gradients. */
#pragma once
#include "model/run/run.h"

/* Counts the documents and labels of the next step's batch over all ranks, as r->policy. Returns by
 * what the sum of its losses is divided. */
double policy_step_terms(Run *r);

/* The values of the batch, for model_use_weights. Dies if a number that the loss needs is missing. */
WeighedRows policy_rows(const Run *r, const Batch *b);

/* Completes the sums of the step's micro-batches on all ranks, and returns the loss. */
double policy_step(Run *r);
