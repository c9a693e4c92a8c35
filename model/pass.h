/* The operations of a micro-batch, all of them and in their order. With a model that is only planned the same calls move no weights
 * and no gradients (fsdp.h), and what is left can be recorded (lifetimes.h). */
#pragma once
#include "model/buffers.h"
#include "model/fsdp.h"

/* What becomes of a micro-batch. */
typedef enum {
    PASS_FORWARD,       /* its losses are added to the sums                                                     */
    PASS_ACCUMULATE,    /* and its gradients to those in the Fsdp; more micro-batches of the step follow        */
    PASS_COMPLETE       /* the same for the last one of a step: then the gradients are summed over ranks, and what is queued
                         * afterwards sees those sums                                                           */
} Pass;

/* Of the tokens and targets that are in device memory. The gradients are those of scale * (sum of losses + z_weight * sum of
 * z-losses). */
void pass_run    (Model *m, Fsdp *f, float scale, float z_weight, Pass pass);

/* Without targets: forward to the stream that the head reads (head.h). */
void pass_forward(Model *m, Fsdp *f);
