/* Flat units: who owns which elements of weights, gradients and moments, and the verbs that the model shows.
 *
 *   weights of unit u     FREE -fsdp_gather-> GATHERING -fsdp_acquire-> IN USE -fsdp_release-> FREE
 *   gradients of unit u   FREE -fsdp_grads->  FILLING   -fsdp_reduce->  REDUCED -(optimizer)-> FREE
 */
#pragma once
#include "model/model.h"

/* This rank's part of one unit: elements [first, first + count) of the flat buffer, in all four. (1, count) each. */
typedef struct { size_t first, count; Tensor master, grad, m, v; } Shard;

typedef struct Fsdp {
    int        num_units;      /* L + 2 */
    UnitShape *shape;          /* [num_units] */
    Shard     *shard;          /* [num_units] */
    void     **weights;        /* [num_units] flat units in Recipe.operand's format; the master's memory if that is the same */
    void     **grads;          /* [num_units] flat units in Recipe.grads' format */
    Unit      *unit, *dunit;   /* [num_units] views of the two above */
    Recipe     recipe;
    bool       last_micro_batch;   /* of the step: fsdp_reduce has to sum over ranks */
} Fsdp;

/* Places this rank's part of every unit in the arena; called twice, to measure and to place. */
void        fsdp_plan   (Fsdp *f, Arena *a, const ModelConfig *c, const Recipe *r, int world, int rank);
void        fsdp_gather (Fsdp *f, int unit);               /* starts to bring the unit's weights here */
const Unit *fsdp_acquire(Fsdp *f, int unit);               /* they are readable by what is queued from now on */
void        fsdp_release(Fsdp *f, int unit);
Unit       *fsdp_grads  (Fsdp *f, int unit);               /* where this unit's gradients are added */
void        fsdp_reduce (Fsdp *f, int unit);               /* gradients are complete on this rank: sum them over ranks */
void        fsdp_init   (Fsdp *f, const ModelConfig *c, uint64_t seed);    /* initial weights; the same for any world size */
void        fsdp_zero_grads(Fsdp *f);
void        fsdp_updated(Fsdp *f);                         /* the optimizer (or a load) changed the master weights */
void        fsdp_free   (Fsdp *f);
