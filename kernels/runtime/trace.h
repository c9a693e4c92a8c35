/* Device time of a step: spans on the queues, waits between queues, and a trace for Perfetto or
 * chrome://tracing.
 *
 * Waits are measured in every step: the time that the compute queue waits for other queues is
 * exposed communication. All other spans, including each operation (operations.h), are recorded
 * only in the steps of `profile`, in trace-rank<r>.json in the save folder. One step at a time is
 * traced, by one thread. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/device.h"

const char *trace_queue_name(Queue q); /* "compute" */

/* the folder of traces; the first traced step creates the file */
void trace_open(const char *folder, int rank);
void trace_step(long step, bool record); /* begins a step */
/* milliseconds that the compute queue waited in the step; the device must be idle */
double trace_step_end(void);
void trace_close(void);

/* begins a span on the current queue; name: a string literal; unit: a number, -1: none */
void trace_begin(const char *name, int unit);
void trace_end(void);                                           /* ends the latest span */
void trace_wait(DeviceMark *m, const char *for_what, int unit); /* device_wait, as a span */

/* For the watchdog, while the main thread hangs: returns what the compute queue waits for; NULL:
 * nothing. */
const char *trace_blocked(int *unit);
