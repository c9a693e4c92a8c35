/* Transfers: memory moves to the host or to other ranks on a queue of its own, next to computation.
 * A message to another stage begins when its buffer is full; before the buffer is filled again, the
 * compute queue waits for the end:
 *
 *     QUEUE_COMPUTE    fills the buffer, begin   computes                  wait, fills it again
 *     QUEUE_SEND                                 sends, end
 *
 * Weights are gathered ahead into a buffer that is free. Begin is then divided into allow, when the
 * buffer was read for the last time, and start:
 *
 *     QUEUE_COMPUTE    reads the buffer, allow   computes                  wait, reads it again
 *     QUEUE_GATHER                               start, gathers, end */
#pragma once
#include "kernels/runtime/device.h"

/* start waits for `allowed`, wait for `done`; NULL: there is nothing to wait for. {0} at first. A
 * transfer is used again and again. */
typedef struct {
    DeviceMark *allowed, *done;
} Transfer;

/* allow: the transfer may start after all that the current queue has. start: switches to queue q,
 * after that. begin: both. end: returns to the compute queue. */
void transfer_allow(Transfer *t);
void transfer_start(const Transfer *t, Queue q);
void transfer_begin(Transfer *t, Queue q);
void transfer_end(Transfer *t);

/* The current queue waits for the end, as a span (trace.h). */
void transfer_wait(const Transfer *t, const char *for_what, int unit);

/* Frees the marks. */
void transfer_free(Transfer *t);
