/* Rehearses a step without a device: calls the code of a step for one rank of any mesh, and records
 * each operation that it would queue. So predictions of time and traffic follow the code, and need
 * no second description of it. */
#pragma once
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "model/shape/config.h"
#include "model/shape/pipeline.h"

/* Work on a queue; a mark; a wait for a mark. Event.mark has the number of the mark. */
typedef enum { EVENT_WORK, EVENT_MARK, EVENT_WAIT } EventKind;

/* What limits the speed of work: FLOPs and device memory; the bus to the host; links between
 * ranks. */
typedef enum { WORK_DEVICE, WORK_HOST, WORK_RANKS } WorkKind;

/* Values of Event.unit: UNIT_NONE: work of no unit; UNIT_UPDATE: the gradient norm and the
 * optimizer. */
enum { UNIT_NONE = -1, UNIT_UPDATE = -2 };

typedef struct {
    EventKind kind;
    Queue queue;
    int mark;              /* for marks and waits */
    int unit;              /* unit that the work belongs to, or UNIT_... */
    const char *operation; /* for work */
    WorkKind work;
    /* WORK_DEVICE: bytes read and written; WORK_HOST: bytes copied; WORK_RANKS: bytes sent, as
     * comm_ring_bytes counts them */
    double flops, bytes;
    int bits;  /* bits of the multiplied operands */
    Sent what; /* for WORK_RANKS */
    Ranks ranks;
    int neighbour; /* for a message between stages: the stage of the neighbour */
    bool receives; /* the event is a message that the neighbour sends */
} Event;

typedef struct {
    Event *event; /* in the order in which the host queues them */
    int count, capacity, marks;
    size_t sent[NUM_SENT]; /* bytes that the rank sends in the step */
    Pipeline pipe;         /* pipeline position of the stage */
    double device, host;   /* planned bytes of memory, without memory of libraries */
} Rehearsal;

/* Fills r[0 .. count - 1]: r[i] is a step of micro_batches[i] micro-batches on the first rank of
 * `stage`, with the dry run's plan of memory. A step that is not recorded runs first, so that kept
 * weights and marks exist. With documents, each sequence is one document. rehearsal_free frees one
 * Rehearsal. */
void rehearse(Rehearsal *r, const int *micro_batches, int count, const Config *c, int stage);
void rehearsal_free(Rehearsal *r);

/* Number of micro-batches of a dry run's step. */
int rehearsal_micro_batches(const Config *c);
