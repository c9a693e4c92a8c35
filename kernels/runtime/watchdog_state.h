/* What a rank shows the watchdogs of its host: written by watchdog_marks.c, read by watchdog.c. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "kernels/runtime/workers.h"

enum { WATCHING = 1, LEAVING }; /* RankState.state; 0: not started */

/* A thread that works for the main one. `doing` is read as RankState.operation is. */
typedef struct {
    _Atomic unsigned long beats;
    _Atomic bool busy;
    char doing[96];
} WorkerState;

/* State that a rank shares with its host. `operation` is read only if it has not changed for
 * seconds. */
typedef struct {
    _Atomic int state;
    int rank;
    pid_t pid;
    _Atomic unsigned long marks;    /* calls of watchdog_mark, _together and _neighbour */
    _Atomic unsigned long together; /* calls of watchdog_mark_together, without ... */
    /* ... those since watchdog_enter_stage, which only ranks of `stage` make as often */
    _Atomic unsigned long inside;
    /* -1: not between watchdog_enter_stage and watchdog_leave_stage */
    _Atomic int stage;
    _Atomic unsigned long beats; /* of the watchdog's thread */
    _Atomic bool waits;          /* the last mark was _together or _neighbour */
    _Atomic bool patient;
    _Atomic int needs;               /* Worker that the main thread waits for */
    WorkerState worker[NUM_WORKERS]; /* NO_WORKER is never busy */
    _Atomic int part;
    _Atomic long step;
    char operation[64];
} RankState;

extern RankState *watchdog_own; /* this rank's */
void watchdog_alone(void);      /* from now on no watchdog reads it */
