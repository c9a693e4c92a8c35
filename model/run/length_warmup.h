/* Sequence length warmup. While the length of a step is less than T, each sequence of T tokens
 * consists of several shorter sequences, and attention stays inside each of them, as inside
 * documents [OLMo-core, SequenceLengthSchedulerCallback without `truncate`]. So every token and
 * every label is trained on, and batches contain the same tokens as without the warmup. Data,
 * schedule and checkpoints are independent of it. */
#pragma once
#include "model/run/run.h"

/* (b->sequences, T): where the short sequences and documents begin in the step after r->state.step.
 * Valid until the next call. */
const uint8_t *length_warmup_begins(Run *r, const Batch *b);
