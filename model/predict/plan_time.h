/* Predicts the time of a step for a dry run, with the rates of an H100. */
#pragma once
#include "model/predict/timeline.h"

/* The most GPUs with which predictions were compared. */
enum { PLAN_TIME_MEASURED_RANKS = 2 };

/* A step of the configured mesh; and whether there is one: a mesh of several hosts needs
 * `internode_gb_per_s`. */
bool plan_time_is_known(const Config *c);
StepTime plan_time(const Config *c);

/* Tokens per second of each rank. */
double plan_time_speed(const Config *c, const StepTime *t);

/* Prints the time on rank 0, by unit and by queue, and what to change. All ranks call. */
void plan_time_print(const Config *c);

/* What limits the step, and what would change that: a sentence, malloc'ed. */
char *plan_time_advice(const Config *c, const StepTime *t);
