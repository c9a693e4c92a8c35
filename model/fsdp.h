/* Flat units: who owns which elements of weights, gradients and moments, and the verbs that the model shows.
 *
 *   weights of unit u     FREE -fsdp_gather-> GATHERING -fsdp_acquire-> IN USE -fsdp_release-> FREE
 *   gradients of unit u   FREE -fsdp_grads->  FILLING   -fsdp_reduce->  REDUCED -(optimizer)-> FREE
 *
 * A tensor whose compute format is the master's is the master's memory. Others in F32 or BF16 have a copy of their own,
 * refreshed when the optimizer has run. FP8 operands exist for two blocks at a time: fsdp_gather casts the master
 * weights into one of two slots, unit u into slot u % 2; their scales are made once, when the optimizer has run. */
#pragma once
#include "model/model.h"

/* This rank's part of one unit: elements [first, first + count) of the flat buffer, in all four. (1, count) each. */
typedef struct { size_t first, count; Tensor master, grad, m, v; } Shard;

/* Which copies of an FP8 weight the next use reads: W in forward, W^T in backward. */
typedef enum { FOR_FORWARD = 1, FOR_BACKWARD = 2 } Use;

enum { WEIGHT_SLOTS = 2 };

typedef struct Fsdp {
    int        num_units;      /* L + 2 */
    UnitShape *shape;          /* [num_units] */
    Shard     *shard;          /* [num_units] */
    Unit      *unit, *dunit;   /* [num_units] weights in compute format, and gradients */
    Recipe     recipe;
    bool       last_micro_batch;   /* of the step: fsdp_reduce has to sum over ranks */
} Fsdp;

/* Places this rank's part of every unit in the arena; called twice, to measure and to place. */
void        fsdp_plan   (Fsdp *f, Arena *a, const ModelConfig *c, const Recipe *r, int world, int rank);
size_t      fsdp_weight_bytes(const Fsdp *f);              /* of compute copies, slots included */

void        fsdp_gather (Fsdp *f, int unit, int uses);     /* starts to bring the unit's weights here; uses: of enum Use */
const Unit *fsdp_acquire(Fsdp *f, int unit);               /* they are readable by what is queued from now on */
void        fsdp_release(Fsdp *f, int unit);
Unit       *fsdp_grads  (Fsdp *f, int unit);               /* where this unit's gradients are added */
void        fsdp_reduce (Fsdp *f, int unit);               /* gradients are complete on this rank: sum them over ranks */

void        fsdp_init   (Fsdp *f, const ModelConfig *c, uint64_t seed);    /* initial weights; the same for any world size */
void        fsdp_zero_grads(Fsdp *f);
void        fsdp_updated(Fsdp *f);                         /* the optimizer (or a load) changed the master weights */
void        fsdp_free   (Fsdp *f);
