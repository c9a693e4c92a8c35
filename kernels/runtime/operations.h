/* Watches: callbacks that learn what each operation reads and writes. The memory plan, traces and
 * tests use them. Each operation is a function, made from its row of kernels/operation_list.h, that
 * calls the watch, if there is one, and then the back end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/mesh.h"

/* READS: the result depends on this memory. WRITES: the memory holds a result afterwards, which
 * does not depend on what was there before. SPOILS: the memory may hold anything afterwards. An
 * operation may write memory that it reads. */
enum { READS = 1, WRITES = 2, SPOILS = 4 };
typedef struct {
    const char *at;
    size_t bytes;
    unsigned how;
} Access;

/* Two values of `how` that do not describe memory. MULTIPLIES + bits: `bytes` is the number of
 * FLOPs of matrix products whose operands have `bits`. OVER_RANKS + neighbour: the operation
 * communicates in a group of ranks. */
enum { OVER_RANKS = 1 << 8, MULTIPLIES = 1 << 9 };

/* flops: of the operation's matrix products, whose operands have `bits`; 0: none. ranks: the group
 * that communicates; 0: none. neighbour: the stage that a message goes to or comes from
 * (collectives.h). */
typedef struct {
    const char *name;
    const Access *access;
    int count;
    double flops;
    int bits;
    Ranks ranks;
    int neighbour;
} Operation;

/* Queues and marks of a watch that skips all operations: they replace the device's. unit: work of a
 * unit begins, such as "forward" of unit 3; name NULL: it ends. */
typedef struct {
    void (*queue)(void *watcher, Queue q);
    DeviceMark *(*mark)(void *watcher, DeviceMark *reuse);
    void (*wait)(void *watcher, DeviceMark *m);
    void (*unmark)(void *watcher, DeviceMark *m);
    void (*unit)(void *watcher, const char *name, int unit);
} WatchedQueues;

/* begin returns false: the operation is skipped, and end is not called. Operations inside begin and
 * end are not watched. queues: NULL: they are the device's. */
typedef struct {
    bool (*begin)(void *watcher, const Operation *o);
    void (*end)(void *watcher, const Operation *o);
    void *watcher;
    const WatchedQueues *queues;
} Watch;

/* Sets the watch of all operations; NULL: none. *w must stay valid as long as it is set. Returns
 * the previous watch. One thread at a time. */
const Watch *operations_watch(const Watch *w);

/* Tell a watch with queues that some work of a unit begins, such as "forward", or ends. */
void operations_unit_begin(const char *name, int unit);
void operations_unit_end(void);

/* Called by each operation if there is a watch. begin: fills o with those accesses of `all` that
 * exist, FLOPs and ranks, and calls the watch; false: the operation must be skipped. */
bool operations_watched(void);
bool operation_begin(Operation *o, Access *all, int count);
void operation_end(const Operation *o);
