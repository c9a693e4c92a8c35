/* What the main thread of this rank does now (marks), and what the threads that work for it do
 * (beats). The watchdogs (watchdog.h) read both. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/rank_state.h"
#include "kernels/runtime/workers.h"

/* Marks that this rank is about to do `operation`, a noun ("forward", "reading tokens"), on the
 * unit `unit` (-1: none). Only for the main thread. */
void watchdog_mark(const char *operation, int unit);

/* As watchdog_mark, for operations in which all ranks, in the same order, wait for each other:
 * collectives, and waits for a device that runs collectives. Ranks wait for the rank that has
 * entered the fewest of these operations. */
void watchdog_mark_together(const char *operation, int unit);

/* Ranks of different pipeline stages do different things. After watchdog_set_stage(stage), the
 * marks of watchdog_mark_together are compared only with marks of ranks of this stage, until
 * watchdog_set_stage(-1). watchdog_mark_neighbour marks a wait for a neighbouring stage. */
void watchdog_set_stage(int stage);
void watchdog_mark_neighbour(const char *operation, int unit);

void watchdog_set_step(long step); /* the step that the following marks belong to */

/* Workers are threads that work for the main thread. A worker beats at each step of its work, with
 * what it does ("writing step10.tmp/model.safetensors"); NULL: it is idle. Between
 * watchdog_wait_for(w) and watchdog_wait_for(NO_WORKER) the main thread waits for w. As long as w
 * beats, the rank makes progress. If w is busy and does not beat, the rank hangs in what w reported
 * last. */
void watchdog_beat(Worker w, const char *doing);
void watchdog_wait_for(Worker w);

/* Announces that the following operations may take long without marks, for example deleting a
 * folder. Until watchdog_set_patient(false) the timeout is PATIENCE times as long. A stopped
 * process is still detected after the timeout itself. */
enum { PATIENCE = 3 };
void watchdog_set_patient(bool patient);

/* For the watchdog: from now on this rank writes its state to *state; NULL: to memory that no
 * watchdog reads. */
void watchdog_show(SharedState *state);
/* For the watchdog: copies the state that this rank has written. */
void watchdog_read_own(RankState *s);
