/* Optimizers as data. A row says which states an optimizer keeps for the weights and in which
 * formats, which hyper-parameters it has, and how a step goes. How states are sharded, placed,
 * saved, loaded by other ranks, measured and counted in the memory plan follows from the row: an
 * optimizer is one more row, which a program can also add when it starts. */
#pragma once
#include "model/shape/config.h"

enum { MAX_STATES = 4 };

/* Where the format of a state comes from: `own`; `own` in layers (UnitKind.is_layer) and
 * `elsewhere` in other units; a column of the recipe. */
typedef enum { OWN_FORMAT, OWN_FORMATS, MOMENT1, MOMENT2 } StateFormat;

/* Which trained weights have a state: all; matrices of layers (Param.is_operand); all except these.
 * */
typedef enum { STATE_OF_ALL, STATE_OF_MATRICES, STATE_OF_OTHERS } StateOf;

/* One value for each of these weights; starts as 0. */
typedef struct {
    const char *name;  /* in files, after the weight's name: "exp_avg", as in PyTorch */
    const char *label; /* in metrics: "m" */
    StateFormat from;
    /* if from OWN_FORMAT or, in layers, OWN_FORMATS; groups divide PARAM_ALIGN */
    Format own;
    StateOf of;
    Format elsewhere; /* if from OWN_FORMATS */
} OptimizerState;

/* Keys of the configuration that not every optimizer has; all have a learning rate. */
enum { HAS_BETAS = 1, HAS_EPS = 2, HAS_WEIGHT_DECAY = 4, HAS_NEWTON_SCHULZ = 8 };

/* Arguments of a step. An optimizer reads those for which its row has a HAS_* bit. */
typedef struct {
    double lr, beta1, beta2, eps;
    double weight_decay; /* 0: this parameter does not decay */
    double grad_scale;   /* the gradient is multiplied by it: clipping */
    long update;         /* updates made, this one included: t of bias corrections */
    uint64_t seed;       /* seed of stochastic rounding, different in each run and step */
    Numbering numbering; /* positions of the elements that are updated: see `step` */
} StepParams;

typedef struct {
    const char *name; /* optimizer.name */
    int num_states;   /* up to MAX_STATES */
    OptimizerState state[MAX_STATES];
    unsigned has; /* of HAS_* */
    /* states 0 and 1 are Adam's m and v, and w moves along m / (sqrt(v) + eps): known to
     * telemetry */
    bool is_adam;
    /* muon.h updates the matrices, with state number 0; `step` updates everything else */
    bool orthogonalizes;
    /* Updates n elements of one parameter. w, grad and num_states states are (1, n) in device
     * memory; a state that w does not have has no data. Elements are consecutive, or runs of rows
     * as p->numbering says; the first has number `first` in the model. Ranks have different
     * elements, so random values may depend only on (seed, number). */
    void (*step)(Tensor w, const Tensor *state, Tensor grad, const StepParams *p, uint64_t first);
} Optimizer;

const Optimizer *optimizer_find(const char *name); /* NULL if there is none */
/* the i-th; NULL after the last */
const Optimizer *optimizer_at(int i);
Format optimizer_format(const Optimizer *o, int state, const Recipe *r, bool in_layer);
/* Whether any state takes its format from that column of the recipe. */
bool optimizer_reads(const Optimizer *o, StateFormat column);

/* The row with one more state, after its own: `average` in F32, the mean of snapshots of the
 * weights (run/average.h). One at a time. */
const Optimizer *optimizer_averaged(const Optimizer *o);
#define AVERAGE_STATE "average"

/* Adds a row, which must stay, before a configuration is read. Dies if its name is taken or it does
 * not fit. */
void optimizer_add(const Optimizer *row);
