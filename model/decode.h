/* One sequence, some tokens at a time: the blocks' caches hold the keys and values of those before, so that each token goes through
 * the model once [Pope et al. 2022, Efficiently Scaling Transformer Inference]. For a model planned with Config.generate; on all
 * ranks the same calls. */
#pragma once
#include "model/model.h"

void decode_begin (Model *m);                                            /* a new sequence: the caches are empty */

/* The next `count` tokens of it, in passes of up to m->N; with those before them at most m->P. */
void decode_append(Model *m, Fsdp *f, const int *tokens, int count);

/* The logits (vocab_size) behind the last token, on the host. Waits. */
void decode_logits(Model *m, Fsdp *f, float *logits);
