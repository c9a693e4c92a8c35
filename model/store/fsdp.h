/* Flat units: which rank has which elements of weights, gradients and moments, and the verbs that
 * the model shows.
 *
 *   weights of unit u     FREE -fsdp_gather-> GATHERING -fsdp_acquire-> IN USE -fsdp_release-> FREE
 *   gradients of unit u   FREE -fsdp_grads->  FILLING   -fsdp_reduce->  REDUCING -(mark)->     FREE
 *
 * (1) A gather waits, in its queue, for the release of the memory it overwrites. (2) fsdp_acquire
 * makes the compute queue wait, never the host. (3) Collectives are issued in the same order on
 * every rank. (4) Only what says so blocks the host.
 *
 * Each rank of a shard group owns one slice of every unit: of its master weights, accumulated
 * gradients and moments; all ranks at the same place of their groups hold the same. The strategies
 * are the size of that group and two choices of memory: of how many units the gathered weights stay
 * until the optimizer has changed them, and whether gradients are summed over ranks once per step
 * or with every micro-batch. predict/memory.c decides, by the memory, what the configuration leaves
 * open.
 *
 *   NO_SHARD        groups of 1           nothing to gather
 *   FULL_SHARD      one group of all      two blocks' weights at a time; those of as many units as fit stay
 *                                         [FairScale; Zhao et al. 2023, PyTorch FSDP]
 *   SHARD_GRAD_OP   one group of all      weights stay                  [Rajbhandari et al. 2020, ZeRO-2]
 *   HYBRID_SHARD    a group per host, or of any size; gradients are summed over the replicas too
 *
 * With pipeline stages (pipeline.h) all of this is within a stage, which has some of the units.
 *
 * FP8 operands are gathered as codes. Each has its own scale; once per step one all-reduce takes
 * the maxima of all. Copies for computing exist only where the stored weights can't serve: in
 * another format, or sharded (the table `ways` of param_store.c). The trained, the frozen and the
 * quantized parameters of a unit are regions, sharded and gathered one after the other. */
#pragma once
#include "model/store/param_store.h"

/* starts to bring the unit's weights here; uses: of enum Use */
void fsdp_gather(ParamStore *store, int unit, int uses);
/* The same, called before another unit computes, so that the copies overlap with it. It does
 * nothing where blocks share one buffer (store->overlaps is false). */
void fsdp_gather_ahead(ParamStore *store, int unit, int uses);
/* they are readable by what is queued from now on */
const UnitTensors *fsdp_acquire(ParamStore *store, int unit);
void fsdp_release(ParamStore *store, int unit);
/* where this unit's gradients are added, or written if empty */
UnitTensors *fsdp_grads(ParamStore *store, int unit);
/* This micro-batch's are complete: starts to sum them over ranks. `last`: they are the step's
 * last. */
void fsdp_reduce(ParamStore *store, int unit, bool last);
/* what is queued from now on sees all sums */
void fsdp_wait_grads(ParamStore *store);

/* initial weights; the same for any number of ranks */
void store_init(ParamStore *store, const ModelConfig *c, uint64_t seed);
/* their part of it: all else is loaded */
void store_init_adapters(ParamStore *store, const ModelConfig *c, uint64_t seed);
/* Begins a step: marks all gradients as empty, so that its first micro-batch overwrites them. */
void fsdp_empty_grads(ParamStore *store);
/* all states of the optimizer are 0, in padding too. Waits */
void store_zero_states(ParamStore *store);
/* The optimizer changed this parameter's master weights, which are on the host; `master`: this
 * rank's, on the device. All ranks of a shard group call, for each parameter that store_encodes. */
void fsdp_encode(ParamStore *store, int unit, const Param *p, Tensor master);
/* the optimizer changed all master weights */
void store_updated(ParamStore *store);
/* all weights are others than before */
void store_loaded(ParamStore *store);
