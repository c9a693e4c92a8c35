/* The watch of operations. */
#include "kernels/runtime/operations.h"

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

bool operation_begin(Operation *o, Access *all, int count)
{
    for (int i = 0; i < count; i++)
        if (all[i].at && all[i].bytes && all[i].how)
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
