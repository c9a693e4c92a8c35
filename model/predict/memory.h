/* Chooses how a run uses its memory where the configuration does not decide it, and prints the
 * plan. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/store_types.h"

/* The mesh of a run's ranks, or of the ranks that a dry run plans for. */
Mesh memory_mesh(const Config *c);

/* Plans this rank's part of the run. If grad_sync_mode is not given, gradients are summed over
 * ranks once per step if the whole gradients leave 3 GiB of the device free (3.3 with tensor
 * ranks). Unless the sharding strategy decides it, gathered weights (on one rank: rounded or
 * transposed weights) are kept for the whole step in as many units as leave the same amount of
 * memory free. Memory of other programs does not count as free. All ranks must call this. A dry run
 * uses the configured ranks and memory. */
void memory_plan(Model *m, ParamStore *store, const Config *c);

/* memory_plan for a rank of this pipeline stage. */
void memory_plan_stage(Model *m, ParamStore *store, const Config *c, int stage);

/* Bytes of device memory that may be planned; bytes that a GPU uses beyond the plan. */
double memory_of_device(const Config *c);
double memory_allowance(const Config *c);

/* Dies if the host of a rank lacks memory for the plan's host part and for a checkpoint. All ranks
 * must call this. */
void memory_check_host(const Model *m, const ParamStore *store, const Config *c);

/* Prints model and plan on stdout, on rank 0, in lines of 80 columns; for a dry run also formats
 * and optimizer. */
void memory_print(const Model *m, const ParamStore *store, const Config *c);
