/* What a rank shows the watchdogs of its host: written by watchdog_marks.c, read by watchdog.c. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/runtime/workers.h"

enum { WATCHING = 1, LEAVING }; /* RankState.state; 0: not started */

/* Text with a final 0, written by one thread. A reader at the same time gets words of the old text
 * and of the new one. */
typedef struct {
    _Atomic uint64_t word[OPERATION_NAME / sizeof(uint64_t)];
} SharedText;

void shared_text_write(SharedText *t, const char *text);
void shared_text_read(char text[OPERATION_NAME], const SharedText *t);

/* A thread that works for the main one. */
typedef struct {
    _Atomic unsigned long beats;
    _Atomic bool busy;
    SharedText doing;
} WorkerState;

/* State that a rank shares with its host: its threads write it, and the watchdogs of all ranks read
 * it. NOTE: GCC reads an atomic value that is an array's index, as in worker[s->needs], without the
 * atomic instruction. */
typedef struct {
    _Atomic int state;
    int rank; /* this and the next do not change */
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
    SharedText operation; /* "": none yet */
} RankState;

extern RankState *watchdog_own; /* this rank's */
void watchdog_alone(void);      /* from now on no watchdog reads it */
