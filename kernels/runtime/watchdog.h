/* Detects ranks that died, hang or were stopped, reports the rank and its operation, and ends all
 * ranks.
 *
 * The main thread of each rank marks what it is about to do. Its other threads beat while they
 * work. Marks and beats are in memory that the ranks of a host share. Each rank has a thread that
 * does not call MPI and watches them. The thread of a host's first rank also watches the other
 * hosts (hosts.h). A mark costs a few stores. Without a watchdog, as in tests, marks are
 * ignored. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/workers.h"

/* Starts this rank's thread. All ranks call it, after comm_start. A rank without progress for
 * `timeout` seconds ends the run, even if it is the only rank. */
void watchdog_start(int timeout);
/* Changes the timeout. Until all ranks have read their configuration, ranks may have different
 * timeouts; a waiting rank uses its own timeout. */
void watchdog_set_timeout(int timeout);
/* Sets how messages call a unit: `name` writes the name of unit number `unit` ("block 3"). If
 * `name` is NULL, units are not named. */
enum { WATCHDOG_UNIT_NAME = 32 };
void watchdog_set_names(void (*name)(int unit, char text[WATCHDOG_UNIT_NAME]));
void watchdog_stop(void); /* all ranks call it; waits for all ranks, then ends the thread */

/* Ends this rank, and thereby all ranks, with `status`. Prints `text`, which includes the line
 * break, on stderr, unless another rank is already ending all ranks. Any thread and signal handlers
 * may call it. */
_Noreturn void watchdog_end(const char *text, int status);
/* gets the current operation of this rank, for such a text */
void watchdog_operation(char text[OPERATION_NAME]);
