/* Predicts the time of a step for a dry run, with the rates of an H100. */
#pragma once
#include "model/predict/timeline.h"

/* The largest number of GPUs for which predictions were compared with measurements. */
enum { PLAN_TIME_MEASURED_RANKS = 2 };

/* Whether plan_time can predict. It cannot with eval_only or generate, nor for several hosts
 * without internode_gb_per_s. */
bool plan_time_is_known(const Config *c);
/* Predicts a step of the configured mesh. */
StepTime plan_time(const Config *c);

/* Tokens per second of each rank. */
double plan_time_speed(const Config *c, const StepTime *t);

/* Prints the time on rank 0, by unit and by queue, and advice. All ranks must call this. */
void plan_time_print(const Config *c);

/* Returns a sentence, malloc'ed: what limits the step, and which key would change this. */
char *plan_time_advice(const Config *c, const StepTime *t);
