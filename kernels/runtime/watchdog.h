/* Notices ranks that died, hang or were stopped, says which and in what, and ends all of them.
 *
 * The main thread of each rank marks what it is about to do, its other threads beat while they work; these marks and
 * beats of all ranks of a host lie in memory that they share. A thread per rank, which calls no MPI, watches them, and that
 * of each host's first rank the other hosts (hosts.h). Marking costs a few stores and needs no watchdog: without one (in
 * tests) marks go nowhere. */
#pragma once
#include <stdbool.h>

/* Starts this rank's thread. All ranks call, after comm_start. A rank that does not go on for `timeout` seconds ends
 * the run, also if it is the only one. */
void watchdog_start(int timeout);
/* Another timeout, which may differ between ranks for a while, as while they read what says it: who waits goes by its own. */
void watchdog_set_timeout(int timeout);
/* Names the parts in messages: `name` writes what part number `part` is called ("block 3"); NULL: by their numbers. */
enum { PART_NAME = 32 };
void watchdog_set_names(void (*name)(int part, char text[PART_NAME]));
void watchdog_stop (void);              /* all ranks call; waits for all, then ends the thread */

/* Ends this rank, and by that all, with `status`: `text`, which ends its line, goes to stderr unless another rank is just
 * ending all. Any thread may call, and so may a signal handler. */
_Noreturn void watchdog_end(const char *text, int status);
const char *watchdog_operation(void);   /* what this rank is doing, for such a text */

/* This rank is about to do `operation`, a noun ("forward", "reading tokens"), on the part of that number (-1: on
 * none). Marks are the main thread's alone. */
void watchdog_mark(const char *operation, int part);

/* The same for what all ranks do in the same order and where each waits for the others: collectives, and waiting for
 * a device that runs them. A rank that has entered fewer of these than its neighbours is the one they wait for. */
void watchdog_mark_together(const char *operation, int part);

void watchdog_set_step(long step);          /* the step that the following marks belong to */

/* Threads that work for the main one. One beats while it works, each time that it goes on, with what it does ("writing
 * step10.tmp/model.safetensors"); NULL: it has nothing to do. Between watchdog_wait_for(w) and watchdog_wait_for(NO_WORKER)
 * the main thread needs what w works on: as long as w beats, the rank goes on, however long that takes, and if w works
 * and does not beat, the rank hangs in what w said last. */
typedef enum { NO_WORKER, WORKER_DATA, WORKER_VALIDATION, WORKER_SAVE, NUM_WORKERS } Worker;
void watchdog_beat    (Worker w, const char *doing);
void watchdog_wait_for(Worker w);

/* What follows has parts that may take long and cannot mark, as a folder that is deleted. Until `false` the timeout is
 * PATIENCE times as long; a stopped process is still noticed after the timeout itself. */
enum { PATIENCE = 3 };
void watchdog_set_patient(bool patient);
