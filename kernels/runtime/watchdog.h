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
/* Changes the timeout. Until all ranks have read their configuration, ranks may have different
 * timeouts; a waiting rank uses its own timeout. */
void watchdog_set_timeout(int timeout);
/* How messages call a unit: `name` writes the name of unit number `unit` ("block 3"); NULL: "unit
 * 3". */
enum { WATCHDOG_UNIT_NAME = 32 };
void watchdog_set_names(void (*name)(int unit, char text[WATCHDOG_UNIT_NAME]));
void watchdog_stop(void); /* all ranks call; waits for all, then ends the thread */

/* Ends this rank, and thereby all, with `status`: prints `text`, which includes the line break, on
 * stderr unless another rank is already ending all. For any thread and for signal handlers. */
_Noreturn void watchdog_end(const char *text, int status);
/* the current operation of this rank, for such a text */
void watchdog_operation(char text[OPERATION_NAME]);
