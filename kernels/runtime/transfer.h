/* Transfers move memory next to computation, to the host or to other ranks. Each kind has a queue
 * of its own:
 *
 *     compute queue    fills memory, begin, computes other things ..., wait, uses the result
 *     queue q                          operations of the transfer, end
 *
 * A transfer is used again and again; at first it is {0}. If its memory is free long before it
 * begins, allow and start replace begin:
 *
 *     compute queue    uses memory, allow, computes other things ..., wait, uses the memory again
 *     queue q                          start, operations of the transfer, end */
#pragma once
#include "kernels/runtime/device.h"

/* Marks: start waits for `allowed`; wait waits for `done`. NULL: there is nothing to wait for. */
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
void transfer_wait(const Transfer *t, const char *for_what, int part);

/* Frees the marks: it is {0} again. */
void transfer_free(Transfer *t);
