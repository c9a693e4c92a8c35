/* How long a step takes: the queues of all stages, each in order, with their waits for each other. */
#pragma once
#include "model/run/rates.h"

/* Whose time it is; and what takes it. Exchanges between context ranks are on the queue of computation, and so are some between
 * tensor ranks; of the others `exchange` has what that queue waits for them. `waiting`: for weights, sums, copies and other stages. */
typedef enum { OWNER_EMBEDDING, OWNER_BLOCKS, OWNER_HEAD, OWNER_UPDATE, NUM_OWNERS } Owner;
typedef enum { USE_COMPUTE, USE_EXCHANGE, USE_GATHER, USE_SUM, USE_HOST, USE_SEND, USE_WAITING, NUM_USES } TimeUse;

typedef struct {
    double seconds;                             /* of a step */
    double use[NUM_OWNERS][NUM_USES];            /* of the stage whose queue of computation works longest */
    int    stage;                               /* that one */
    double device, host;                        /* most planned bytes of memory of a rank */
} StepTime;

/* A step of `stages` rehearsals, the first rank of each stage at its place. */
StepTime timeline_step(const Rehearsal *r, int stages, const RankPlace *place, int units);
