/* The model at work: from planned to placed, and a micro-batch through all of it. */
#pragma once
#include "model/pass.h"

/* model_alloc: allocates what model_plan (plan_model.h) measured, and places every tensor in it.
 * model_free: the reverse of both. */
void model_alloc(Model *m, ParamStore *store, const Config *c);
void model_free(Model *m, ParamStore *store);

/* model_rehearse: gives everything addresses that have no memory, so that a step can be called
 * under a watch that skips all operations and has its own queues (runtime/operations.h).
 * model_rehearsed: ends this; call it before the watch ends. model_on_host: whether such an address
 * stands for host memory. */
void model_rehearse(Model *m, ParamStore *store, const Config *c);
void model_rehearsed(Model *m, ParamStore *store);
bool model_on_host(const void *p);

typedef struct {
    double loss, zloss;
} Losses;

/* Runs `count` micro-batches of attn.B whole sequences. The arrays are host memory (count, B, T);
 * context ranks pass the same ones. target -1: masked. begins 1: a document begins there, NULL:
 * each sequence is a document; it matters if attention stays inside documents. Computes the
 * gradients of scale * (sum of losses + z_weight * sum of z-losses). After PASS_COMPLETE,
 * operations that are queued later see their sums over ranks. The micro-batches of a step may be
 * divided among several calls; with pipeline stages, a call has one of them or all. All ranks of a
 * pipeline call. */
void model_micro_batches(Model *m, ParamStore *store, const int *tokens, const int *targets,
                         const uint8_t *begins, int count, float scale, float z_weight,
                         PassKind pass);

/* model_micro_batches for a single micro-batch. */
void model_micro_batch(Model *m, ParamStore *store, const int *tokens, const int *targets,
                       const uint8_t *begins, float scale, float z_weight, PassKind pass);

/* The images of the next call of model_micro_batches, model_micro_batch or decode_append, in its
 * order of tokens; they must stay until it returns. Without this call a batch has no images. */
void model_use_images(Model *m, ImageRows images);

/* model_put_tokens: copies `count` tokens to the device as the input of pass_forward, as one
 * document. model_put_sequences: copies this rank's part of whole sequences (B, T). model_logits:
 * after pass_forward, the logits (vocab_size) of this rank's row `row`, on the host; waits for the
 * device. */
void model_put_tokens(Model *m, const int *tokens, int count);
void model_put_sequences(Model *m, const int *tokens);
void model_logits(Model *m, ParamStore *store, int row, float *logits);
/* The sums over all tokens since model_zero_losses; waits for the device. */
void model_zero_losses(Model *m);
Losses model_losses(const Model *m);

/* (B, T) on the host: the cross entropy of each target of the last micro-batch, 0 where masked or
 * another rank's. Waits for the device. */
void model_token_losses(const Model *m, float *losses);
