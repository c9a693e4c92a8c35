/* Sums gradients over ranks as codes (fsdp.grad_wire). Ranks send each other their gradients of the
 * matrices of blocks in 8 or 16 bits, and add them in F32 in the order of ranks: an all-to-all, and
 * a sum. A rank's own gradients are not rounded.
 *
 *   shards of one host      each rank gets the codes of its slice from all ranks of RANKS_SHARD
 *   shards of several       RANKS_NEAR: the ranks of a host sum the slices of all ranks that have the
 *   hosts                   same number on their hosts; RANKS_HOSTS: these sums are exchanged, coded again
 *   replicas                each replica sums a part of the slice; the sums are gathered unrounded
 *
 * WIRE_FP8_LM has one scale for each matrix, from the maximum of all ranks, and divides it by mu. mu
 * begins at 1, doubles in GRAD_WIRE_STEPS steps, and is halved, but not below 1, after a step in
 * which more than GRAD_WIRE_MOST_CUT of the sent values were cut [Peng et al. 2023, arXiv
 * 2310.18313, sec. 2.1]. DIFFERS from FP8-LM: values are added in F32, not in FP8, so each rank keeps
 * its own values; one mu for the model; mu is at least 1, as scales from maxima cut nothing; scales
 * between hosts come from those inside hosts and the number of added ranks, without another
 * maximum; norms, biases and embeddings are not in FP8; the accumulated gradients are BF16.
 *
 * So an element is rounded once at each level, on any number of ranks. All other parameters, such
 * as norms, biases and adapters, are stored after these matrices. They are summed by an all-reduce,
 * and so are units without trained matrices: embedding and head. */
#pragma once
#include "model/store/store_types.h"

/* Whether the unit's gradients are summed as codes. */
bool grad_wire_has(const ParamStore *store, int unit);
/* This rank's slice of the gradients = the sum of the unit's gradients over RANKS_SHARD. */
void grad_wire_reduce(ParamStore *store, int unit);
/* This rank's slice = the sum over RANKS_REPLICA. */
void grad_wire_sum_replicas(ParamStore *store, int unit);
/* Call when a step begins, and after all its sums: counts what is cut, and adapts mu. */
void grad_wire_begin(ParamStore *store);
void grad_wire_adapt(ParamStore *store);
enum { GRAD_WIRE_STEPS = 1000 };
#define GRAD_WIRE_MOST_CUT 1e-5
/* Places memory for the messages of all units. */
void grad_wire_place(ParamStore *store);
