/* The loss that a step minimizes: cross entropy, or a loss of pairs, soft labels or a policy. */
#pragma once
#include "model/run/run.h"

/* Finds what the loss needs besides the data. All ranks must call this before the first step. */
void loss_open(Run *r);

/* By what the sum of the losses of the batch r->batch is divided. labels: number of labels of all
 * ranks. All ranks must call this. */
double loss_terms(Run *r, double labels);

/* Passes what the loss needs of the batch to the model, for the next call of model_micro_batches. */
void loss_use(Run *r, const Batch *b);

/* The loss of the step, after its micro-batches. s: means per label. All ranks must call this. */
double loss_of_step(Run *r, Losses s);
