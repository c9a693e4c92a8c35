/* Incremental decoding of one sequence, a few tokens at a time: the blocks cache the keys and
 * values of earlier tokens, so each token is computed once [Pope et al. 2022, Efficiently Scaling
 * Transformer Inference]. Needs a model planned with Config.generate; all ranks make the same
 * calls, except that only ranks with the head call decode_logits. A pipeline stage caches the keys
 * and values of its own blocks. */
#pragma once
#include "model/model.h"

/* starts a new sequence: empties the caches */
void decode_begin(Model *m);

/* Appends `count` tokens, in passes of up to m->text.N tokens. A sequence has at most m->text.P
 * tokens in all. After model_use_images, the tokens show these images. */
void decode_append(Model *m, ParamStore *store, const int *tokens, int count);

/* Copies the logits (vocab_size) after the last token to the host. Waits for the device. */
void decode_logits(Model *m, ParamStore *store, float *logits);
