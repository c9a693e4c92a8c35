/* Sums gradients over ranks as codes (fsdp.grad_wire). Ranks send each other their gradients of the
 * matrices of blocks in 8 or 16 bits, and add them in F32 in the order of ranks: an all-to-all, and
 * a sum. A rank's own gradients are not rounded.
 *
 *   shards of one host      each rank gets the codes of its slice from all ranks of RANKS_SHARD
 *   shards of several       RANKS_NEAR: the ranks of a host sum the slices of all ranks that have the
 *   hosts                   same number on their hosts; RANKS_HOSTS: these sums are exchanged, coded again
 *   replicas                each replica sums a part of the slice; the sums are gathered unrounded
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
/* Places memory for the messages of all units. */
void grad_wire_place(ParamStore *store);
