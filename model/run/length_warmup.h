/* Sequence length warmup: while the length of a step is less than T, each sequence of T tokens is
 * several shorter ones, to which attention is limited as to documents [OLMo-core,
 * SequenceLengthSchedulerCallback without `truncate`]. So every token and every label is trained
 * on, batches have the same tokens as without, and data, schedule and checkpoints do not know of
 * it. */
#pragma once
#include "model/run/run.h"

/* (b->sequences, T): where the sequences and documents of the step after r->state.step begin; valid
 * until the next call. */
const uint8_t *length_warmup_begins(Run *r, const Batch *b);
