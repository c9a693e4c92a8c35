/* Where a step's device time goes: spans on the queues, waits between them, and a trace that Perfetto or chrome://tracing shows.
 *
 * Waits are measured in every step: the time for which the compute queue waits for the others is exposed communication. All else,
 * each operation too (operations.h), is recorded in the steps of `profile` only, into trace-rank<r>.json in the save folder. One
 * step at a time, one thread. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/device.h"

const char *trace_queue_name(Queue q);                     /* "compute" */

void   trace_open (const char *folder, int rank);          /* where traces go; the file appears with the first traced step */
void   trace_step (long step, bool record);                /* a step begins */
double trace_step_end(void);       /* milliseconds that the compute queue waited in the step; the device must be idle */
void   trace_close(void);

void   trace_begin(const char *name, int part);            /* a span on the current queue; name: a literal; part: a number, -1: none */
void   trace_end  (void);                                  /* of the span begun last */
void   trace_wait (DeviceMark *m, const char *for_what, int part);     /* device_wait, as a span */

/* For the watchdog, while the main thread stands still: the wait in which the compute queue is; NULL: in none. */
const char *trace_blocked(int *part);
