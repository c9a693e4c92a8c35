/* Detects ranks that died, hang or were stopped, reports which rank and in which operation, and
 * ends all ranks.
 *
 * The main thread of each rank marks what it is about to do; its other threads beat while they
 * work. Marks and beats are in memory shared by the ranks of a host. A thread per rank, which does
 * not call MPI, watches them; that of a host's first rank also watches the other hosts (hosts.h). A
 * mark costs a few stores and needs no watchdog: without one (in tests) marks are ignored. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/workers.h"

/* Starts this rank's thread. All ranks call, after comm_start. A rank without progress for
 * `timeout` seconds ends the run, also if it is the only one. */
void watchdog_start(int timeout);
/* Changes the timeout. Ranks may disagree until all have read their configuration; each waiting
 * rank uses its own. */
void watchdog_set_timeout(int timeout);
/* Names of parts in messages: `name` writes that of part number `part` ("block 3"); NULL: "part
 * 3". */
enum { PART_NAME = 32 };
void watchdog_set_names(void (*name)(int part, char text[PART_NAME]));
void watchdog_stop(void); /* all ranks call; waits for all, then ends the thread */

/* Ends this rank, and thereby all, with `status`: prints `text`, which includes the line break, on
 * stderr unless another rank is already ending all. For any thread and for signal handlers. */
_Noreturn void watchdog_end(const char *text, int status);
/* the current operation of this rank, for such a text */
void watchdog_operation(char text[OPERATION_NAME]);

/* This rank is about to do `operation`, a noun ("forward", "reading tokens"), on this part (-1:
 * none). Only for the main thread. */
void watchdog_mark(const char *operation, int part);

/* The same for operations that all ranks do in the same order, waiting for each other: collectives,
 * and waiting for a device that runs them. Ranks wait for the one that has entered the fewest of
 * these. */
void watchdog_mark_together(const char *operation, int part);

/* With pipeline stages ranks of different stages do different things in between: the following
 * marks `together` are compared with those of ranks of this stage only, until watchdog_leave_stage.
 * watchdog_mark_neighbour: waits for a neighbouring stage. */
void watchdog_enter_stage(int stage);
void watchdog_leave_stage(void);
void watchdog_mark_neighbour(const char *operation, int part);

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
