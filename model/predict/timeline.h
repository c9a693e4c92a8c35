/* How long a step takes: the queues of all stages, each in order, with their waits for each
 * other. */
#pragma once
#include "model/predict/rates.h"

/* Whose time it is; and what takes it. context, tensor: all that these ranks exchange, on any
 * queue. `waiting`: of the queue of computation, for weights, sums, copies, other ranks and other
 * stages. */
typedef enum { OWNER_EMBEDDING, OWNER_BLOCKS, OWNER_HEAD, OWNER_UPDATE, NUM_OWNERS } Owner;
typedef enum {
    USE_COMPUTE,
    USE_CONTEXT,
    USE_TENSOR,
    USE_GATHER,
    USE_SUM,
    USE_HOST,
    USE_SEND,
    USE_WAITING,
    NUM_USES
} TimeUse;

/* All of the stage whose queue of computation works longest. */
typedef struct {
    double seconds; /* of a step */
    double use[NUM_OWNERS][NUM_USES];
    /* what the queue of computation does, or waits for; they add up to its time */
    double exposed[NUM_USES];
    int stage;           /* that one */
    double device, host; /* most planned bytes of memory of a rank */
} StepTime;

/* A step of `stages` rehearsals, of the first rank of each stage in this topology. */
StepTime timeline_step(const Rehearsal *r, int stages, const Topology *topology,
                       const ModelConfig *c);
