/* What changes from step to step by plan: the learning rate and the limit of the gradient norm. */
#pragma once
#include "model/config.h"

/* A run's length, derived from max_duration. */
typedef struct { long steps, tokens; } RunLength;

/* `step` counts from 1; `tokens` are those seen when the step is done. */
double schedule_lr           (const Config *c, RunLength length, long step, long tokens);
double schedule_max_grad_norm(const Config *c, long step, long tokens);    /* 0: no clipping */

/* Dies if warmup and decay do not fit the run, warns if it ends during the warmup. run: its length in the scheduler's units, 0: only
 * its data say that. place: "x.yaml:3: " or "". */
void   schedule_check(const Config *c, double run, const char *place);
