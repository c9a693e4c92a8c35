/* Runs all operations of a micro-batch, in order. With a model that is only planned the same calls
 * move no weights and no gradients (fsdp.h), and the remaining operations can be recorded
 * (lifetimes.h). */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

/* The kinds of passes. */
typedef enum {
    PASS_FORWARD, /* adds the losses to the sums */
    /* also accumulates gradients in the ParamStore; more micro-batches of the step follow */
    /* the same for the last micro-batch of a step: also sums gradients over ranks */
    PASS_ACCUMULATE,
    PASS_COMPLETE
} PassKind;

/* One row of the table of a step (pipeline.h): a micro-batch, whose tokens and targets are in
 * device memory, through a chunk of this stage, forward or backward; messages come from and go to
 * the neighbouring stages. Gradients are those of scale * (sum of losses + z_weight * sum of
 * z-losses). PASS_FORWARD has no backward rows. */
void pass_row(Model *m, ParamStore *store, PipelineRow r, float scale, float z_weight,
              PassKind pass);

/* Without targets: forward to the stream that the head reads (head.h), on the ranks that have it.
 * All ranks of a pipeline call. */
void pass_forward(Model *m, ParamStore *store);
