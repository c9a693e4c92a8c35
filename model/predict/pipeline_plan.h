/* Prints the pipeline stages of a run or a dry run. */
#pragma once
#include "model/store/param_store.h"

/* Prints on rank 0, if there are stages, their number and, of a training, the schedule and how long
 * they wait for each other. */
void pipeline_print(const ParamStore *store);

/* Plans every stage and prints on rank 0 what each has, and its memory. Returns the stage with the
 * most; 0 without stages. All ranks call. */
int pipeline_print_stages(const Config *c);
