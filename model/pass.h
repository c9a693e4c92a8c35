/* Runs all operations of a micro-batch, in order. With a model that is only planned, the same calls
 * move no weights and no gradients (fsdp.h), and lifetimes.h records the operations. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

/* The kinds of passes. */
typedef enum {
    PASS_FORWARD, /* adds the losses to the sums */
    /* also accumulates gradients in the ParamStore; more micro-batches of the step follow */
    PASS_ACCUMULATE,
    /* as PASS_ACCUMULATE, for the last micro-batch of a step: also sums gradients over ranks */
    PASS_COMPLETE
} PassKind;

/* Runs one pass of a micro-batch through a chunk of this stage, forward or backward (pipeline.h).
 * Tokens and targets are in device memory. Exchanges the stream and its gradient with the
 * neighbouring stages. Computes the gradients of scale * (sum of losses + z_weight * sum of
 * z-losses). A schedule of PASS_FORWARD has no backward passes. */
void pass_row(Model *m, ParamStore *store, PipelineRow r, float scale, float z_weight,
              PassKind pass);

/* Runs forward through all blocks, without targets. On the ranks of the last stage, head_logits
 * (head.h) can then read the stream. All ranks of a pipeline must call this. */
void pass_forward(Model *m, ParamStore *store);
