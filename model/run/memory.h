/* What a run's memory is used for: the choices that the plan leaves open, and the plan in words. */
#pragma once
#include "model/plan.h"

/* Plans this rank's part of the run. Where the configuration leaves it open when gradients are summed over ranks, they are summed
 * once per step if the whole gradients leave 3 GiB of the device free. Then, where it is open when
 * weights are gathered (on one rank: rounded or transposed), those of as many units stay as leave as much free, besides what other
 * programs use. All ranks call.
 * A dry run is planned for the ranks and the memory that it was given. */
void memory_plan (Model *m, Fsdp *f, const Config *c);

/* Bytes of the device that the plan is for, and how many of them a GPU has in use beyond the plan. */
double memory_of_device(const Config *c);
double memory_allowance(const Config *c);

/* Ends the program on all ranks if the host has not the memory for what the plan puts there and for a checkpoint. */
void memory_check_host(const Model *m, const Fsdp *f, const Config *c);

/* On stdout: the plan. Rank 0 prints. */
void memory_print(const Model *m, const Fsdp *f, const Config *c);
