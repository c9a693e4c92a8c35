/* Incremental decoding of one sequence, some tokens at a time: the blocks cache keys and values of
 * earlier tokens, so each token is computed once [Pope et al. 2022, Efficiently Scaling Transformer
 * Inference]. Needs a model planned with Config.generate; all ranks make the same calls, except
 * that only ranks with the head call decode_logits. A stage caches keys and values of its own
 * blocks. */
#pragma once
#include "model/model.h"

/* a new sequence: empties the caches */
void decode_begin(Model *m);

/* Appends `count` tokens, in passes of up to m->text.N; at most m->text.P tokens in all. After
 * model_use_images they show its images. */
void decode_append(Model *m, ParamStore *store, const int *tokens, int count);

/* The logits (vocab_size) after the last token, on the host. Waits for the device. */
void decode_logits(Model *m, ParamStore *store, float *logits);
