/* Flat units: who owns which elements of weights, gradients and moments, and the verbs that the model shows.
 *
 *   weights of unit u     FREE -fsdp_gather-> GATHERING -fsdp_acquire-> IN USE -fsdp_release-> FREE
 *   gradients of unit u   FREE -fsdp_grads->  FILLING   -fsdp_reduce->  REDUCING -(mark)->     FREE
 *
 * (1) A gather waits, in its queue, for the release of the memory it overwrites. (2) fsdp_acquire makes the compute queue
 * wait, never the host. (3) Collectives are issued in the same order on every rank. (4) Nothing here blocks the host.
 *
 * Each rank of a shard group owns one slice of every unit: of its master weights, accumulated gradients and moments; all
 * ranks at the same place of their groups hold the same. The strategies are the size of that group and two choices of
 * memory: whether a unit's gathered weights stay until the optimizer has changed them, and whether its gradients are
 * summed over ranks once per step or with every micro-batch.
 *
 *   NO_SHARD        groups of 1           nothing to gather
 *   FULL_SHARD      one group of all      two blocks' weights at a time [FairScale; Zhao et al. 2023, PyTorch FSDP]
 *   SHARD_GRAD_OP   one group of all      weights stay                  [Rajbhandari et al. 2020, ZeRO-2]
 *   HYBRID_SHARD    a group per host, or of any size; gradients are summed over the replicas too
 *
 * FP8 operands are gathered as codes; their scales are one maximum over ranks of all weights, once per step. Copies for
 * computing exist only where the master weights can't serve: in another format, or sharded. */
#pragma once
#include "kernels/device.h"
#include "model/model.h"

/* This rank's part of one unit: elements [first, first + count) of the flat buffer, in all four. (1, count) each. */
typedef struct { size_t first, count; Tensor master, grad, m, v; } Shard;

/* Which copies of an FP8 weight the next use reads: W in forward, W^T in backward. Other formats have one for both. */
typedef enum { FOR_FORWARD = 1, FOR_BACKWARD = 2 } Use;

/* A gathered unit's memory: (1, n) in its compute format, n the largest unit that it serves. */
typedef struct {
    Tensor      flat;                  /* data_t: the transposed copies of FP8 operands */
    int         unit, has;             /* whose weights, -1: nobody's; for which uses they are there */
    DeviceMark *ready, *released;
} WeightSlot;

/* A unit's gradients before they are summed over the shard group. */
typedef struct {
    Tensor      flat;                  /* (1, n) in the recipe's format of gradients */
    int         unit;                  /* who fills it; -1: nobody */
    DeviceMark *filled, *reduced;
} GradSlot;

typedef struct Fsdp {
    int         num_units;             /* L + 2 */
    UnitShape  *shape;                 /* [num_units] */
    Shard      *shard;                 /* [num_units] */
    Unit       *unit, *dunit;          /* [num_units] weights in compute format, and gradients */
    WeightSlot *weight_slot;           /* [num_slots]: those that units share, then one per unit */
    GradSlot   *grad_slot;             /* [num_slots] */
    Tensor      scales;                /* (1, 4 per FP8 operand): scales of the operands, 16 bytes apart */
    Tensor      dense;                 /* (1, n): what block units with FP8 operands have besides them: norm weights */
    float      *norm;                  /* device memory: sum of the squares of this rank's gradients */
    Recipe      recipe;
    Strategy    strategy;
    bool        tied;
    int         shards;                /* ranks of a shard group */
    bool        sum_once;              /* gradients are summed over them once per step; set before fsdp_plan */
    Arena       gathered;              /* memory of the weight slots and of `outgoing`, if shards > 1 */
    void       *outgoing;              /* this rank's slice of the unit that is being gathered */
    DeviceMark *updated, *reduced;
    bool        last_micro_batch;      /* of the step: gradients are now complete on this rank */
} Fsdp;

/* Places this rank's part of every unit in the arena; called twice, to measure and to place. shards, rank: of the shard
 * group, and this rank's place in it. */
void        fsdp_plan   (Fsdp *f, Arena *a, const Config *c, int shards, int rank);
void        fsdp_place_gathered(Fsdp *f);                  /* between the two: allocates what fsdp_plan measured beside `a` */
size_t      fsdp_weight_bytes(const Fsdp *f);              /* of copies for computing */
size_t      fsdp_grad_bytes  (const Fsdp *f);              /* of accumulated gradients and slots */

void        fsdp_gather (Fsdp *f, int unit, int uses);     /* starts to bring the unit's weights here; uses: of enum Use */
const Unit *fsdp_acquire(Fsdp *f, int unit);               /* they are readable by what is queued from now on */
void        fsdp_release(Fsdp *f, int unit);
Unit       *fsdp_grads  (Fsdp *f, int unit);               /* where this unit's gradients are added */
void        fsdp_reduce (Fsdp *f, int unit);               /* this micro-batch's are complete: starts to sum them over ranks */
void        fsdp_wait_grads(Fsdp *f);                      /* what is queued from now on sees all sums */

void        fsdp_init   (Fsdp *f, const ModelConfig *c, uint64_t seed);    /* initial weights; the same for any number of ranks */
void        fsdp_zero_grads(Fsdp *f);
void        fsdp_updated(Fsdp *f);                         /* the optimizer (or a load) changed the master weights */
void        fsdp_free   (Fsdp *f);

/* The part of a parameter that this rank owns: elements *first .. *first + n of the parameter; returns n, maybe 0. */
size_t      shard_part(const Shard *s, const Param *p, size_t *first);
/* Elements from `first` on, counted in the unit, of one of the shard's flat tensors. */
Tensor      shard_view(const Shard *s, Tensor t, size_t first, size_t n);
