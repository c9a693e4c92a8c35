/* What operations read and write, for whoever watches them: the plan of memory, traces and tests see the same operations, with the
 * same memory. A list of operations (kernels/operation_list.h) makes of each a function that asks the watch, if there is one, and
 * does the work. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Of memory that an operation READS its result depends. What it WRITES is afterwards a result, whatever was there before; what it
 * SPOILS may hold anything. It may write what it reads. */
enum { READS = 1, WRITES = 2, SPOILS = 4 };
typedef struct { const char *at; size_t bytes; unsigned how; } Access;

typedef struct { const char *name; const Access *access; int count; } Operation;

/* begin: false: the operation is not done, and end not called. What the two call is not watched. */
typedef struct {
    bool (*begin)(void *watcher, const Operation *o);
    void (*end)  (void *watcher, const Operation *o);
    void *watcher;
} Watch;

/* From now on w, which must last, is asked about all operations; NULL: nobody is. Returns who was before. One thread at a time. */
const Watch *operations_watch(const Watch *w);

/* For the functions of operations. begin: o gets those of `all` that exist, and false means: do nothing. Both ask the watch, which
 * there must be. */
bool operations_watched(void);
bool operation_begin(Operation *o, Access *all, int count);
void operation_end  (const Operation *o);
