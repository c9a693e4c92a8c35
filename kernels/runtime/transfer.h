/* Transfers copy memory to the host or to other ranks on a queue of their own, concurrently with
 * computation. A message to another stage begins when its buffer is full. Before the buffer is
 * filled again, the compute queue waits for the end of the transfer:
 *
 *     QUEUE_COMPUTE    fills the buffer, begin   computes                  wait, fills it again
 *     QUEUE_SEND                                 sends, end
 *
 * Weights are gathered ahead, into a buffer that is free. For weights, begin is divided into two
 * calls: allow after the last read of the buffer, and start when the gather is to begin:
 *
 *     QUEUE_COMPUTE    reads the buffer, allow   computes                  wait, reads it again
 *     QUEUE_GATHER                               start, gathers, end */
#pragma once
#include "kernels/runtime/device.h"

/* transfer_start waits for `allowed`, transfer_wait waits for `done`. NULL: there is nothing to
 * wait for. A transfer is {0} at first, and can be used again and again. */
typedef struct {
    DeviceMark *allowed, *done;
} Transfer;

/* allow: the transfer may start after all work that the current queue has. start: switches to queue
 * q, whose later work runs after that point. begin: allow, then start. end: returns to the compute
 * queue. */
void transfer_allow(Transfer *t);
void transfer_start(const Transfer *t, Queue q);
void transfer_begin(Transfer *t, Queue q);
void transfer_end(Transfer *t);

/* The current queue waits for the end of the transfer. The wait is recorded as a span (trace.h). */
void transfer_wait(const Transfer *t, const char *for_what, int unit);

/* Frees the marks of the transfer. */
void transfer_free(Transfer *t);
