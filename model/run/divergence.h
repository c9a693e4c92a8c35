/* Divergence: warnings, a test of the weights before a checkpoint replaces older ones, and the end
 * of a diverged run. */
#pragma once
#include "model/run/run.h"

/* Warns about a spike, and about a loss far above the loss of an untrained model. */
void divergence_warn(Run *r, const StepStats *t);

/* If no finite loss followed the last save, runs forward and backward of the step's first
 * micro-batch again, which overwrites the gradients. If loss or gradient is not finite, ends the
 * run as divergence_end does. All ranks must call this. */
void divergence_check(Run *r);

/* Ends a run whose last `steps` steps were not finite. Publishes a save that a finite loss
 * followed, saves the state as step<N>-aborted (unless the run keeps no checkpoints), and ends all
 * ranks with an error. */
_Noreturn void divergence_end(Run *r, int steps);

/* Ends the run because of a spike, as divergence_end does, but saves the state before the spike. */
_Noreturn void divergence_end_spike(Run *r, const TrainState *before);
