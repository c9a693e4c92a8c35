/* Training on soft labels. */
#pragma once
#include "model/run/run.h"

/* Gives the loader the soft labels of distill.targets, if there is a distill.loss. All ranks must
 * call this before the first step. */
void distill_open(Run *r);

/* The soft labels of the batch, for model_use_soft_labels; none without a distill.loss. */
SoftRows distill_rows(const Run *r, const Batch *b);

/* The loss that a step minimizes. s: means per label. */
double distill_loss(const Config *c, Losses s);
