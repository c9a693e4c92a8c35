/* What operations read and write, for the memory plan, traces and tests, which all watch the same operations.
 * kernels/operation_list.h makes each operation a function that asks the watch, if there is one, and then runs the back end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* The result depends on memory that an operation READS. Memory that it WRITES holds a result afterwards, independent of its earlier
 * contents; memory that it SPOILS may hold anything. It may write what it reads. */
enum { READS = 1, WRITES = 2, SPOILS = 4 };
typedef struct { const char *at; size_t bytes; unsigned how; } Access;

typedef struct { const char *name; const Access *access; int count; } Operation;

/* begin returns false: the operation is skipped, and end is not called. Operations inside begin and end are not watched. */
typedef struct {
    bool (*begin)(void *watcher, const Operation *o);
    void (*end)  (void *watcher, const Operation *o);
    void *watcher;
} Watch;

/* Sets the watch that is asked about all operations; NULL: none. *w must outlive its use. Returns the watch before. One thread at a
 * time. */
const Watch *operations_watch(const Watch *w);

/* For the functions of operations, if there is a watch. begin: o gets the accesses in `all` that exist; returns false: skip the
 * operation. */
bool operations_watched(void);
bool operation_begin(Operation *o, Access *all, int count);
void operation_end  (const Operation *o);
