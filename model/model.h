/* The model at work: allocates a planned model, and runs micro-batches through it. */
#pragma once
#include "model/pass.h"

/* Allocates the memory that model_plan (plan_model.h) measured, and places every tensor in it. */
void model_alloc(Model *m, ParamStore *store, const Config *c);
/* Frees everything that model_plan and model_alloc made. */
void model_free(Model *m, ParamStore *store);

/* Gives all tensors addresses without memory. A step can then be called under a Watch
 * (runtime/operations.h) that skips all operations and has its own queues. */
void model_rehearse(Model *m, ParamStore *store, const Config *c);
/* Ends the rehearsal. Call it before the Watch ends. */
void model_rehearsed(Model *m, ParamStore *store);
/* Whether an address of a rehearsal stands for host memory. */
bool model_on_host(const void *p);

typedef struct {
    double loss, zloss;
} Losses;

/* Runs `count` micro-batches of attn.B whole sequences. The arrays are in host memory, (count, B,
 * T); all ranks of a context group pass the same arrays. target -1: masked. begins 1: a document
 * begins at this token; begins NULL: each sequence is a document. `begins` matters if attention
 * stays inside documents. Computes the gradients of scale * (sum of losses + z_weight * sum of
 * z-losses). After PASS_COMPLETE, operations that are queued later read the gradients' sums over
 * ranks. Several calls may share the micro-batches of a step; with pipeline stages, a call has one
 * micro-batch or all of the step. All ranks of a pipeline must call this. */
void model_micro_batches(Model *m, ParamStore *store, const int *tokens, const int *targets,
                         const uint8_t *begins, int count, float scale, float z_weight,
                         PassKind pass);

/* model_micro_batches for a single micro-batch. */
void model_micro_batch(Model *m, ParamStore *store, const int *tokens, const int *targets,
                       const uint8_t *begins, float scale, float z_weight, PassKind pass);

/* Sets the images of the next call of model_micro_batches, model_micro_batch or decode_append, in
 * the order of its tokens. The images must stay in memory until that call returns. Without this
 * function, a batch is text only. */
void model_use_images(Model *m, ImageRows images);

/* Says that the next call of model_micro_batches has preference pairs, or documents of a policy,
 * packed as documents; then `begins` is needed. The memory must stay until that call returns.
 * m->pair_sums or m->policy_sums get sums; `scale` is the factor of the sum of the losses. */
void model_use_weights(Model *m, WeighedRows rows);

/* Says that the next call of model_micro_batches has soft labels: the loss of a target is that of
 * m->soft.loss, and the sums of model_losses are cross entropies and divergences. The memory must
 * stay until that call returns. */
void model_use_soft_labels(Model *m, SoftRows rows);

/* Copies `count` tokens to the device as the input of pass_forward, as one document. */
void model_put_tokens(Model *m, const int *tokens, int count);
/* Copies this rank's part of whole sequences (B, T) to the device as the input of pass_forward. */
void model_put_sequences(Model *m, const int *tokens);
/* Call it after pass_forward. Copies the logits (vocab_size) of this rank's row `row` to the host.
 * Waits for the device. */
void model_logits(Model *m, ParamStore *store, int row, float *logits);
void model_zero_losses(Model *m); /* resets the sums of losses */
/* As model_zero_losses, for a step of `sequences` sequences over all ranks: the losses of routers
 * are means over these sequences. */
void model_begin_step(Model *m, int sequences);
/* The sums of losses over all tokens since model_zero_losses. Waits for the device. */
Losses model_losses(const Model *m);

/* Writes the cross entropy of each target of the last micro-batch to `losses` (B, T) on the host; 0
 * where the target is masked or belongs to another rank. Waits for the device. */
void model_token_losses(const Model *m, float *losses);

/* If the run scores soft labels: writes the columns that were chosen for each target of the last
 * micro-batch to `columns` (B, T, m->soft.k) on the host, and their log-probabilities. Columns are
 * -1 where the target is masked or belongs to another rank. */
void model_chosen_columns(const Model *m, int *columns, float *logps);
