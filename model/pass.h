/* Runs all operations of a micro-batch, in order. With a model that is only planned the same calls move no weights and no gradients
 * (fsdp.h), and the remaining operations can be recorded (lifetimes.h). */
#pragma once
#include "model/buffers.h"
#include "model/fsdp.h"

/* The kinds of passes. */
typedef enum {
    PASS_FORWARD,       /* adds the losses to the sums                                                          */
    PASS_ACCUMULATE,    /* also accumulates gradients in the ParamStore; more micro-batches of the step follow        */
    PASS_COMPLETE       /* the same for the last micro-batch of a step: also sums gradients over ranks, and operations that are
                         * queued later see these sums                                                          */
} Pass;

/* Runs a micro-batch on the tokens and targets in device memory. Gradients are those of scale * (sum of losses + z_weight * sum of
 * z-losses). */
void pass_run    (Model *m, ParamStore *f, float scale, float z_weight, Pass pass);

/* Without targets: forward to the stream that the head reads (head.h). */
void pass_forward(Model *m, ParamStore *f);
