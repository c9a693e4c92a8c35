/* What the main thread of this rank does now, and threads that work for it: marks and beats, which
 * the watchdogs (watchdog.h) read. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/rank_state.h"
#include "kernels/runtime/workers.h"

/* This rank is about to do `operation`, a noun ("forward", "reading tokens"), on the unit `unit`
 * (-1: none). Only for the main thread. */
void watchdog_mark(const char *operation, int unit);

/* The same for operations that all ranks do in the same order, waiting for each other: collectives,
 * and waiting for a device that runs them. Ranks wait for the one that has entered the fewest of
 * these. */
void watchdog_mark_together(const char *operation, int unit);

/* With pipeline stages ranks of different stages do different things in between: the following
 * marks `together` are compared with those of ranks of this stage only, until a stage of -1.
 * watchdog_mark_neighbour: waits for a neighbouring stage. */
void watchdog_set_stage(int stage);
void watchdog_mark_neighbour(const char *operation, int unit);

void watchdog_set_step(long step); /* the step that the following marks belong to */

/* Threads that work for the main one. A worker beats at each step of its work, with what it does
 * ("writing step10.tmp/model.safetensors"); NULL: it is idle. Between watchdog_wait_for(w) and
 * watchdog_wait_for(NO_WORKER) the main thread waits for w: as long as w beats, the rank makes
 * progress; if w is busy and does not beat, the rank hangs in what w reported last. */
void watchdog_beat(Worker w, const char *doing);
void watchdog_wait_for(Worker w);

/* The following operations may take long without marks, for example deleting a folder. Until
 * `false` the timeout is PATIENCE times as long; a stopped process is still detected after the
 * timeout itself. */
enum { PATIENCE = 3 };
void watchdog_set_patient(bool patient);

/* For the watchdog. watchdog_show: this rank writes its state to *state from now on; NULL: to
 * memory that no watchdog reads. watchdog_read_own: copies the state that this rank has written. */
void watchdog_show(SharedState *state);
void watchdog_read_own(RankState *s);
