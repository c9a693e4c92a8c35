/* Optimizers as data. A row lists an optimizer's states and their formats, its hyper-parameters,
 * and the function of its step. All other code follows from the row: how states are sharded,
 * placed, saved, loaded by other ranks, measured and counted in the memory plan. So a new optimizer
 * is one more row, which a program can also add when it starts. */
#pragma once
#include "model/shape/config.h"

enum { MAX_STATES = 4 };

/* Where the format of a state comes from. */
typedef enum {
    OWN_FORMAT,  /* `own` */
    OWN_FORMATS, /* `own` in layers (UnitKind.is_layer), and `elsewhere` in other units */
    MOMENT1,     /* moment1 of the recipe */
    MOMENT2      /* moment2 of the recipe */
} StateFormat;

/* Which trained weights have a state. */
typedef enum {
    STATE_OF_ALL,
    STATE_OF_MATRICES, /* matrices of layers (Param.is_operand) */
    STATE_OF_OTHERS    /* all weights except these matrices */
} StateOf;

/* A state has one value for each weight that StateOf selects. The values start as 0. */
typedef struct {
    const char *name;  /* name in files, after the weight's name: "exp_avg", as in PyTorch */
    const char *label; /* name in metrics: "m" */
    StateFormat from;
    /* format for OWN_FORMAT and, in layers, for OWN_FORMATS; the group size divides PARAM_ALIGN */
    Format own;
    StateOf of;
    Format elsewhere; /* format in other units, for OWN_FORMATS */
} OptimizerState;

/* Keys of the configuration that only some optimizers have. All optimizers have a learning rate. */
enum { HAS_BETAS = 1, HAS_EPS = 2, HAS_WEIGHT_DECAY = 4, HAS_NEWTON_SCHULZ = 8 };

/* Arguments of a step. An optimizer reads the arguments for which its row has a HAS_* bit. */
typedef struct {
    double lr, beta1, beta2, eps;
    double weight_decay; /* 0: no decay of this parameter */
    double grad_scale;   /* factor of the gradient: clipping */
    long update;         /* number of updates, this one included: t of bias corrections */
    uint64_t seed;       /* seed of stochastic rounding, different in each run and step */
    Numbering numbering; /* positions of the updated elements: see `step` */
} StepParams;

typedef struct {
    const char *name; /* value of optimizer.name */
    int num_states;   /* number of states, at most MAX_STATES */
    OptimizerState state[MAX_STATES];
    unsigned has; /* HAS_* bits */
    /* for telemetry: states 0 and 1 are Adam's m and v, and w moves along m / (sqrt(v) + eps) */
    bool is_adam;
    /* muon_step.h updates the matrices, with state number 0; `step` updates all other parameters */
    bool orthogonalizes;
    /* Updates n elements of one parameter. w, grad and num_states states are (1, n) in device
     * memory; a state that w does not have has no data. Elements are consecutive, or runs of rows
     * as in p->parts; the first element has number `first` in the model. Ranks have different
     * elements, so random values may depend only on (seed, number). */
    void (*step)(Tensor w, const Tensor *state, Tensor grad, const StepParams *p, uint64_t first);
} Optimizer;

const Optimizer *optimizer_find(const char *name); /* NULL: no optimizer has this name */
/* the i-th row; NULL after the last */
const Optimizer *optimizer_at(int i);
Format optimizer_format(const Optimizer *o, int state, const Recipe *r, bool in_layer);
/* Whether a state takes its format from this column of the recipe. */
bool optimizer_reads(const Optimizer *o, StateFormat column);

/* The row with an additional last state: `average` in F32, the mean of snapshots of the weights
 * (run/average.h). Only one such row exists at a time. */
const Optimizer *optimizer_averaged(const Optimizer *o);
#define AVERAGE_STATE "average"

/* Adds a row, which must stay in memory. Call it before a configuration is read. Dies if the name
 * is taken or the row is not valid. */
void optimizer_add(const Optimizer *row);
