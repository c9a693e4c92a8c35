/* Sets and calls the watch of operations and queues. */
#include "kernels/runtime/operations.h"

#include "kernels/runtime/queues.h"

static const Watch *watch;

const Watch *operations_watch(const Watch *w)
{
    const Watch *before = watch;
    watch = w;
    return before;
}

bool operations_watched(void)
{
    return watch != NULL;
}

/* Returns true if the access describes FLOPs or ranks instead of memory. */
static bool takes_note(Operation *o, const Access *a)
{
    if (a->how & MULTIPLIES) {
        o->flops = (double)a->bytes;
        o->bits = (int)(a->how & ~(unsigned)MULTIPLIES);
    } else if (a->how & OVER_RANKS) {
        o->ranks = (Ranks)a->bytes;
        o->neighbour = (int)(a->how & ~(unsigned)OVER_RANKS);
    }
    return a->how & (MULTIPLIES | OVER_RANKS);
}

bool operation_begin(Operation *o, Access *all, int count)
{
    for (int i = 0; i < count; i++)
        if (!takes_note(o, &all[i]) && all[i].at && all[i].bytes && all[i].how)
            all[o->count++] = all[i];
    o->access = all;
    const Watch *w = operations_watch(NULL);
    const bool wanted = w->begin(w->watcher, o);
    operations_watch(w);
    return wanted;
}

void operation_end(const Operation *o)
{
    const Watch *w = operations_watch(NULL);
    if (w->end)
        w->end(w->watcher, o);
    operations_watch(w);
}

static const WatchedQueues *watched_queues(void)
{
    return watch ? watch->queues : NULL;
}

void operations_unit_begin(const char *name, int unit)
{
    if (watched_queues())
        watch->queues->unit(watch->watcher, name, unit);
}

void operations_unit_end(void)
{
    operations_unit_begin(NULL, -1);
}

void device_queue(Queue q)
{
    const WatchedQueues *w = watched_queues();
    if (w)
        w->queue(watch->watcher, q);
    else
        backend_device_queue(q);
}

DeviceMark *device_mark(DeviceMark *reuse)
{
    const WatchedQueues *w = watched_queues();
    return w ? w->mark(watch->watcher, reuse) : backend_device_mark(reuse);
}

void device_wait(DeviceMark *m)
{
    const WatchedQueues *w = watched_queues();
    if (w)
        w->wait(watch->watcher, m);
    else
        backend_device_wait(m);
}

void device_unmark(DeviceMark *m)
{
    const WatchedQueues *w = watched_queues();
    if (w)
        w->unmark(watch->watcher, m);
    else
        backend_device_unmark(m);
}
