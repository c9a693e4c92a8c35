/* FSDP: gathers the weights of each unit before it computes, and reduces its gradients afterwards.
 *
 *   weights of unit u     FREE -fsdp_gather-> GATHERING -fsdp_acquire-> IN USE -fsdp_release-> FREE
 *   gradients of unit u   FREE -fsdp_grads->  FILLING   -fsdp_reduce->  REDUCING -(mark)->     FREE
 *
 * (1) A gather waits, in its queue, for the release of the memory that it overwrites. (2)
 * fsdp_acquire makes the compute queue wait, never the host. (3) Collectives are issued in the same
 * order on every rank. (4) A function blocks the host only if its comment says so.
 *
 * Each rank of a shard group owns one slice of the master weights, accumulated gradients and
 * moments of every unit. Ranks with the same position in their groups hold identical slices. A
 * strategy is the size of the group and two choices of memory: how many units keep their gathered
 * weights until the next update, and whether gradients are summed over ranks once per step or after
 * every micro-batch. predict/memory.c makes the choices that the configuration leaves open.
 *
 *   NO_SHARD        groups of 1           nothing to gather
 *   FULL_SHARD      one group of all      two blocks' weights at a time; more if they fit
 *                                         [FairScale; Zhao et al. 2023, PyTorch FSDP]
 *   SHARD_GRAD_OP   one group of all      weights stay                  [Rajbhandari et al. 2020, ZeRO-2]
 *   HYBRID_SHARD    a group per host, or of any size; gradients are summed over the replicas too
 *
 * With pipeline stages (pipeline.h), each stage shards its own units in this way.
 *
 * FP8 operands are gathered as codes. Each has its own scale. One all-reduce per step computes the
 * scales of all operands. The store copies a weight only if the stored weight cannot be used
 * directly, because it has another format or is sharded (the table `ways` of param_store.c). The
 * regions of a unit, TRAINED, FROZEN and QUANTIZED, are sharded and gathered one after the
 * other. */
#pragma once
#include "model/store/param_store.h"

/* Starts gathering the unit's weights. uses: bits of enum Use */
void fsdp_gather(ParamStore *store, int unit, int uses);
/* As fsdp_gather, for the next unit: call this before the current unit computes, so that gather and
 * computation overlap. Does nothing if blocks share one buffer (store->overlaps is false). */
void fsdp_gather_ahead(ParamStore *store, int unit, int uses);
/* Returns the unit's weights. Work that is queued from now on may read them. */
const UnitTensors *fsdp_acquire(ParamStore *store, int unit);
void fsdp_release(ParamStore *store, int unit);
/* Returns the buffer to which the unit's gradients are added, or written if they are `empty`. */
UnitTensors *fsdp_grads(ParamStore *store, int unit);
/* Call when the gradients of this micro-batch are complete: starts to sum them over ranks. `last`:
 * this is the last micro-batch of the step. */
void fsdp_reduce(ParamStore *store, int unit, bool last);
/* Work that is queued from now on reads the sums of all units. */
void fsdp_wait_grads(ParamStore *store);

/* Sets initial weights. They are the same for any number of ranks. */
void store_init(ParamStore *store, const ModelConfig *c, uint64_t seed);
/* Sets initial weights of adapters only. All other weights are loaded. */
void store_init_adapters(ParamStore *store, const ModelConfig *c, uint64_t seed);
/* Begins a step: marks all gradients as empty, so that the first micro-batch overwrites them. */
void fsdp_empty_grads(ParamStore *store);
/* Sets all optimizer states to 0, padding included. Waits for the device. */
void store_zero_states(ParamStore *store);
/* Call after the optimizer updated a parameter whose master weights are on the host. master: this
 * rank's slice, on the device. All ranks of a shard group must call this, for each parameter for
 * which store_encodes is true. */
void fsdp_encode(ParamStore *store, int unit, const Param *p, Tensor master);
/* Call after the optimizer updated all master weights. */
void store_updated(ParamStore *store);
/* Call after weights were replaced, for example by a checkpoint. */
void store_loaded(ParamStore *store);
