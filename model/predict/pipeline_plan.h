/* Prints the pipeline stages of a run or a dry run. */
#pragma once
#include "model/store/param_store.h"

/* If there are stages, rank 0 prints their number; for a training run also the schedule, and how
 * long stages wait for each other. */
void pipeline_print(const ParamStore *store);

/* Plans every stage, and prints the units and the memory of each stage on rank 0. Returns the stage
 * with the most memory; 0 without stages. All ranks must call this. */
int pipeline_print_stages(const Config *c);
