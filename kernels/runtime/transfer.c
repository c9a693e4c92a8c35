#include "kernels/runtime/transfer.h"

#include "kernels/runtime/trace.h"

void transfer_allow(Transfer *t)
{
    t->allowed = device_mark(t->allowed);
}

void transfer_start(const Transfer *t, Queue q)
{
    device_queue(q);
    device_wait(t->allowed);
}

void transfer_begin(Transfer *t, Queue q)
{
    transfer_allow(t);
    transfer_start(t, q);
}

void transfer_end(Transfer *t)
{
    t->done = device_mark(t->done);
    device_queue(QUEUE_COMPUTE);
}

void transfer_wait(const Transfer *t, const char *for_what, int unit)
{
    trace_wait(t->done, for_what, unit);
}

void transfer_free(Transfer *t)
{
    device_unmark(t->allowed);
    device_unmark(t->done);
    *t = (Transfer){ 0 };
}
