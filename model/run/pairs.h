/* Training on preference pairs, and scoring. */
#pragma once
#include "model/run/run.h"

/* Gives the loader the log-probabilities of the reference model, for a loss with a reference. A run
 * that begins without preference.reference first computes them with the loaded weights, also for
 * evaluators of pairs. Dies if they are missing. All ranks must call this before the first step. */
void pairs_open(Run *r);

/* --score: writes the log-probabilities of data.paths and of evaluators of pairs. */
void pairs_score(Run *r);

/* Counts the pairs of the next step's batch over all ranks, as r->pairs. Returns false without a
 * preference.loss. */
bool pairs_count(Run *r);

/* The pairs of the batch, for model_use_weights; no pairs without a preference.loss. */
WeighedRows pairs_rows(const Run *r, const Batch *b);

/* Completes the sums over pairs of the step's micro-batches on all ranks, and returns the mean
 * loss. At step 1 prints how far policy and reference differ, which should be equal models. */
double pairs_step(Run *r);
