/* Muon's step of the matrices of layers [torch.optim.Muon; Jordan et al. 2024; scales: Liu et al.
 * 2025, arXiv 2502.16982].
 *
 *   each rank, on its shard     momentum, and the update u in BF16
 *   all ranks                   all-gather: u of one unit
 *   each matrix on one rank     Newton-Schulz: u becomes X, its nearest orthogonal matrix, nearly
 *   all ranks                   reduce-scatter: X, which the other ranks have as 0
 *   each rank, on its shard     w = (1 - lr decay) w - lr scale X
 *
 * q, k, v, gate and up are matrices of their own. A matrix is computed whole by one rank, so its
 * bits do not depend on the number of ranks. */
#pragma once
#include "model/store/param_store.h"

/* Device memory of the step, for one unit at a time; 0 with other optimizers. It is shared with
 * activations. */
size_t muon_bytes(const ParamStore *store, const Config *c);

/* Whether muon_step makes the step of p. */
bool muon_steps(const ParamStore *store, const Param *p);

/* The step of all matrices of this stage. All ranks of a shard group call. */
void muon_step(ParamStore *store, const Config *c, const StepParams *step);
