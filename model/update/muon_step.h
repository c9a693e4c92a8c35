/* Muon's step of the matrices of layers [torch.optim.Muon; Jordan et al. 2024; scales: Liu et al.
 * 2025, arXiv 2502.16982].
 *
 *   each rank, on its shard     momentum, and the update u in BF16
 *   all ranks                   all-gather: u of one unit
 *   each matrix on one rank     Newton-Schulz: u becomes X, its nearest orthogonal matrix, nearly
 *   all ranks                   reduce-scatter: X, which is 0 on all other ranks
 *   each rank, on its shard     w = (1 - lr decay) w - lr scale X
 *
 * q, k, v, gate and up are separate matrices. One rank computes a whole matrix, so its bits do not
 * depend on the number of ranks. */
#pragma once
#include "model/store/param_store.h"

/* Device memory of the step in bytes, for one unit at a time; 0 for other optimizers. The step
 * shares this memory with activations. */
size_t muon_bytes(const ParamStore *store, const Config *c);

/* Whether muon_step updates p. */
bool muon_steps(const ParamStore *store, const Param *p);

/* Updates all matrices of this stage. All ranks of a shard group must call this. */
void muon_step(ParamStore *store, const Config *c, const StepParams *step);
