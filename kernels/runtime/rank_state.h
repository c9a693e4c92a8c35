/* The state of a rank, as watchdogs see it. watchdog_marks.c writes it, hosts.c brings it to other
 * hosts, and watchdog.c reads it. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/runtime/workers.h"

/* State of a worker, a thread that works for the main thread. */
typedef struct {
    unsigned long beats;
    bool busy;
    char doing[OPERATION_NAME];
} WorkerState;

/* State of the main thread. */
typedef struct {
    unsigned long marks;    /* calls of the three functions watchdog_mark* */
    unsigned long together; /* calls of watchdog_mark_together that are not counted in `inside` */
    unsigned long inside;   /* calls that only ranks of `stage` make, since watchdog_set_stage */
    long step;
    int stage, unit; /* -1: no stage, no unit */
    Worker needs;    /* the worker that the main thread waits for */
    bool waits;      /* true if the last mark was _together or _neighbour */
    bool patient;
    char operation[OPERATION_NAME]; /* "": no operation yet */
} Marks;

typedef struct {
    long rank, leader, pid; /* leader: the first rank of its host */
    char host[64];
    unsigned long beats; /* heartbeats of the watchdog's thread; 0: none has arrived */
    long leaving;        /* not 0: this rank is ending all ranks with its own message */
    Marks main;
    WorkerState worker[NUM_WORKERS]; /* NO_WORKER is never busy */
} RankState;

/* A RankState in memory that threads and processes share. Only one thread at a time writes a
 * member. A reader at the same time may get words of the old member and of the new member. */
typedef struct {
    _Atomic uint64_t word[sizeof(RankState) / sizeof(uint64_t)];
} SharedState;

/* offset and bytes of a member, which consists of whole words */
#define STATE_MEMBER(member) offsetof(RankState, member), sizeof(((RankState *)0)->member)
#define STATE_WHOLE 0, sizeof(RankState)
void state_write(SharedState *to, const void *member, size_t at, size_t bytes);
void state_read(void *member, const SharedState *from, size_t at, size_t bytes);
