/* Predicts the time of a step: simulates the queues of all stages, each in order, and their waits
 * for each other. */
#pragma once
#include "model/predict/rates.h"

/* Owner: the part of the model that uses the time. TimeUse: the use of the time. CONTEXT, TENSOR:
 * all exchanges of context or tensor ranks, on any queue. WAITING: the compute queue waits for
 * weights, sums, copies, other ranks or other stages. */
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

/* Times of the stage whose compute queue works longest. */
typedef struct {
    double seconds; /* time of the step in seconds */
    double use[NUM_OWNERS][NUM_USES];
    /* seconds by activity of the compute queue, including waits; the sum is the time of the
     * queue */
    double exposed[NUM_USES];
    int stage;           /* number of this stage */
    double device, host; /* planned bytes of memory: maximum over ranks */
} StepTime;

/* Predicts the time of a step from `stages` rehearsals: one of the first rank of each stage. */
StepTime timeline_step(const Rehearsal *r, int stages, const Topology *topology,
                       const ModelConfig *c);
