/* Decides how a run uses its memory, where the configuration leaves choices open, and prints the
 * plan. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

/* The mesh of the ranks of a run, or of those that a dry run is given. */
Mesh memory_mesh(const Config *c);

/* Plans this rank's part of the run. If grad_sync_mode is not given, gradients are summed over
 * ranks once per step if the whole gradients leave 3 GiB of the device free (3.3 with tensor
 * ranks). Then, unless the sharding strategy decides it, the gathered weights (on one rank: rounded
 * or transposed) of as many units are kept for the whole step as leave that free, apart from memory
 * of other programs. All ranks call. A dry run uses the ranks and the memory that it was given. */
void memory_plan(Model *m, ParamStore *store, const Config *c);

/* memory_plan for a rank of that pipeline stage. */
void memory_plan_stage(Model *m, ParamStore *store, const Config *c, int stage);

/* Bytes of the device that may be planned, and the part that a GPU uses beyond the plan. */
double memory_of_device(const Config *c);
double memory_allowance(const Config *c);

/* Dies if the host of any rank lacks memory for the plan's part on the host and for a checkpoint.
 * All ranks call. */
void memory_check_host(const Model *m, const ParamStore *store, const Config *c);

/* Prints model and plan on stdout, on rank 0, in lines of 80 columns; for a dry run also formats
 * and optimizer. */
void memory_print(const Model *m, const ParamStore *store, const Config *c);
