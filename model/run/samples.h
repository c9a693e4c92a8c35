/* `samples`: how the model being trained continues fixed prompts, greedily, in the log. */
#pragma once
#include <signal.h>

#include "model/run/log.h"
#include "model/model.h"

typedef struct Samples Samples;

/* Reads the prompts, which must have room for a token more in model.max_sequence_length. NULL: none are configured, and every call
 * does nothing. All ranks call all three. */
Samples *samples_open (const Config *c);

/* Writes a line {"step": ..., "samples": [{"prompt": tokens, "tokens": new ones}, ...]} to metrics.jsonl, and a line for each
 * prompt to stdout. Every token is a forward pass of micro-batches with these prompts: no cache, and no memory beside
 * training's. Once *stop is not 0 on any rank it ends early, writes nothing and returns true on all. */
bool     samples_write(Samples *s, Model *m, Fsdp *f, Log *l, long step, const volatile sig_atomic_t *stop);
void     samples_close(Samples *s);
