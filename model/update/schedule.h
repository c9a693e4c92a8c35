/* Schedules of the learning rate, of the limit of the gradient norm, and of the batch size. */
#pragma once
#include "model/shape/config.h"

/* A run's length, derived from max_duration. */
typedef struct {
    long steps, tokens;
} RunLength;

/* `step` counts from 1; `tokens`: number of tokens trained on after this step. */
double schedule_lr(const Config *c, RunLength length, long step, long tokens);
double schedule_max_grad_norm(const Config *c, long step, long tokens); /* 0: no clipping */

/* The batch size of a step, counted from 1, in sequences over all ranks [Merrill et al. 2025, arXiv
 * 2505.23971: batch size warmup by doubling]. */
int schedule_batch(const Config *c, long step);
/* Number of tokens in the steps after `first` up to `last`. */
double schedule_tokens(const Config *c, long first, long last);
/* Number of steps after `step` that train `tokens` more tokens. */
double schedule_steps_for(const Config *c, long step, double tokens);

/* The length of the sequences of a step (counted from 1) in tokens: a multiple of
 * min_sequence_length that grows linearly to T. */
int schedule_length(const Config *c, long step);

/* max_duration in the scheduler's units; 0: max_duration is in epochs, whose length depends on the
 * data. */
double schedule_duration(const Config *c);

/* The end of the schedule: t_max if it is given, else `run`. Both are in the scheduler's units. */
double schedule_end(const Config *c, double run);

/* Dies if warmup and decay do not fit the run; warns if the run ends during the warmup. run: length
 * of the run in the scheduler's units; 0: the length depends on the data. where: "x.yaml:3: " or
 * "". */
void schedule_check(const Config *c, double run, const char *where);
