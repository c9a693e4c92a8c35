/* `samples`: logs greedy continuations of fixed prompts during training. */
#pragma once
#include <stdatomic.h>

#include "model/run/log.h"
#include "model/model.h"

typedef struct Samples Samples;

/* Reads the prompts, which must be shorter than model.max_sequence_length. Returns NULL if no
 * prompts are configured; then every call does nothing. All ranks must call all three functions. */
Samples *samples_open(const Config *c);

/* Writes a line {"step": ..., "samples": [{"prompt": tokens, "tokens": new tokens}, ...]} to
 * metrics.jsonl, and a line for each prompt to stdout. Every token takes a forward pass over all
 * prompts in micro-batches: there is no cache, and no additional memory. If *stop is set on any
 * rank, ends early, writes nothing, and returns true on all ranks. */
bool samples_write(Samples *s, Model *m, ParamStore *store, Log *l, long step,
                   const atomic_int *stop);
void samples_close(Samples *s);
