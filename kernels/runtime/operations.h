/* What operations read and write, for the memory plan, traces and tests, which all watch the same
 * operations. kernels/operation_list.h makes each operation a function that asks the watch, if
 * there is one, and then runs the back end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/mesh.h"

/* The result depends on memory that an operation READS. Memory that it WRITES holds a result
 * afterwards, independent of its earlier contents; memory that it SPOILS may hold anything. It may
 * write what it reads. */
enum { READS = 1, WRITES = 2, SPOILS = 4 };
typedef struct {
    const char *at;
    size_t bytes;
    unsigned how;
} Access;

/* Two values of `how` that describe no memory. MULTIPLIES + bits: `bytes` is the FLOPs of products
 * whose operands have `bits`. OVER_RANKS + neighbour: the operation communicates in a group of
 * ranks. */
enum { OVER_RANKS = 1 << 8, MULTIPLIES = 1 << 9 };

/* flops: of its matrix products, whose operands have `bits`; 0: it has none. ranks: the group that
 * takes part; 0: no other rank. neighbour: which of two stages (collectives.h) sends or
 * receives. */
typedef struct {
    const char *name;
    const Access *access;
    int count;
    double flops;
    int bits;
    Ranks ranks;
    int neighbour;
} Operation;

/* Queues and marks of a watch under which no operation runs. `part`: work named so, of a unit,
 * begins; NULL: it ends. */
typedef struct {
    void (*queue)(void *watcher, Queue q);
    DeviceMark *(*mark)(void *watcher, DeviceMark *reuse);
    void (*wait)(void *watcher, DeviceMark *m);
    void (*unmark)(void *watcher, DeviceMark *m);
    void (*part)(void *watcher, const char *name, int unit);
} WatchedQueues;

/* begin returns false: the operation is skipped, and end is not called. Operations inside begin and
 * end are not watched. queues: NULL: they are the device's. */
typedef struct {
    bool (*begin)(void *watcher, const Operation *o);
    void (*end)(void *watcher, const Operation *o);
    void *watcher;
    const WatchedQueues *queues;
} Watch;

/* Sets the watch that is asked about all operations; NULL: none. *w must outlive its use. Returns
 * the watch before. One thread at a time. */
const Watch *operations_watch(const Watch *w);

/* A part of the work of a unit begins, or ends, for a watch with queues. */
void operations_part_begin(const char *name, int unit);
void operations_part_end(void);

/* For the functions of operations, if there is a watch. begin: o gets the accesses in `all` that
 * exist, products and ranks; returns false: skip the operation. */
bool operations_watched(void);
bool operation_begin(Operation *o, Access *all, int count);
void operation_end(const Operation *o);
