/* A model that an update may have ruined: what is proven before it takes the place of an older one, what the user is told, and how
 * a run ends that can't go on. */
#pragma once
#include "model/run/run.h"

/* Tells of a spike, and of a loss beyond what a model that knows nothing would have. */
void ruin_warn(Run *r, const StepStats *t);

/* If the last save is not proven, forward and backward of the step's first micro-batch must be finite once more; else the run ends
 * as with ruin_end. The gradients are gone then. All ranks call. */
void ruin_prove(Run *r);

/* The last `steps` steps were not finite. What is proven is published, the state goes beside (unless the run keeps no checkpoints),
 * and all ranks end with an error. */
_Noreturn void ruin_end(Run *r, int steps);

/* The same for a spike that ends the run, with the state before it. */
_Noreturn void ruin_end_spike(Run *r, const TrainState *before);
