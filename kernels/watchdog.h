/* Notices ranks that died, hang or were stopped, says which and in what, and ends all of them.
 *
 * The main thread of each rank marks what it is about to do; these marks of all ranks of a host lie in memory that
 * they share. A thread per rank, which calls no MPI, watches them, and that of each host's first rank the other hosts
 * (hosts.h). Marking costs a few stores and needs no watchdog: without one (in tests) marks go nowhere. Only the main
 * thread may mark. */
#pragma once
#include <stdbool.h>

/* Starts this rank's thread. All ranks call, after comm_start. A rank that does not go on for `timeout` seconds,
 * while others wait, ends the run; alone it is not watched. `units`: how many the model has, for their names. */
void watchdog_start(int timeout, int units);
void watchdog_stop (void);              /* all ranks call; waits for all, then ends the thread */
void watchdog_leave(void);              /* this rank is about to end all with a message of its own */

/* This rank is about to do `operation`, a noun ("forward", "reading tokens"), on `unit` (-1: on none). */
void watchdog_mark(const char *operation, int unit);

/* The same for what all ranks do in the same order and where each waits for the others: collectives, and waiting for
 * a device that runs them. A rank that has entered fewer of these than its neighbours is the one they wait for. */
void watchdog_mark_together(const char *operation, int unit);

void watchdog_set_step(long step);          /* the step that the following marks belong to */

/* What follows may take long: files of any size are read or written. Until `false` the timeout is PATIENCE times as
 * long; a stopped process is still noticed after the timeout itself. */
enum { PATIENCE = 10 };
void watchdog_set_patient(bool patient);
