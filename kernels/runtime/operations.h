/* Watches are callbacks that learn what each operation reads and writes. The memory plan, traces
 * and tests use them. Each operation is a function made from its row of kernels/operation_list.h.
 * The function calls the watch, if one is set, and then the back end. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/mesh.h"

/* READS: the result depends on this memory. WRITES: after the operation the memory holds a result
 * that does not depend on its previous contents. SPOILS: after the operation the memory may hold
 * anything. An operation may write memory that it reads. */
enum { READS = 1, WRITES = 2, SPOILS = 4 };
typedef struct {
    const char *at;
    size_t bytes;
    unsigned how;
} Access;

/* Two values of `how` that do not describe memory. MULTIPLIES + bits: `bytes` is the number of
 * FLOPs of matrix products whose operands have this number of bits. OVER_RANKS + neighbour: the
 * operation communicates in the group of ranks `bytes`. */
enum { OVER_RANKS = 1 << 8, MULTIPLIES = 1 << 9 };

/* flops: FLOPs of the operation's matrix products, whose operands have `bits` bits; 0: no products.
 * ranks: the group that communicates; 0: none. neighbour: the stage that a message goes to or comes
 * from (collectives.h). */
typedef struct {
    const char *name;
    const Access *access;
    int count;
    double flops;
    int bits;
    Ranks ranks;
    int neighbour;
} Operation;

/* Queues and marks of a watch that skips all operations. These functions replace the device's
 * queues and marks. part: called with a name when work of a unit begins, such as "forward" of unit
 * 3, and with name NULL when this work ends. */
typedef struct {
    void (*queue)(void *watcher, Queue q);
    DeviceMark *(*mark)(void *watcher, DeviceMark *reuse);
    void (*wait)(void *watcher, DeviceMark *m);
    void (*unmark)(void *watcher, DeviceMark *m);
    void (*unit)(void *watcher, const char *name, int unit);
} WatchedQueues;

/* If begin returns false, the operation is skipped, and end is not called. Operations that begin or
 * end start themselves are not watched. queues NULL: the device's queues are used. */
typedef struct {
    bool (*begin)(void *watcher, const Operation *o);
    void (*end)(void *watcher, const Operation *o);
    void *watcher;
    const WatchedQueues *queues;
} Watch;

/* Sets the watch of all operations; NULL: no watch. *w must stay valid as long as it is set.
 * Returns the previous watch. Only one thread may call it at a time. */
const Watch *operations_watch(const Watch *w);

/* Both functions tell a watch with queues that some work of a unit, such as "forward", begins or
 * ends. */
void operations_unit_begin(const char *name, int unit);
void operations_unit_end(void);

/* Each operation calls these functions if a watch is set. operation_begin fills o with the accesses
 * of `all` that exist, the FLOPs and the ranks, and calls the watch. If it returns false, the
 * operation must be skipped. */
bool operations_watched(void);
bool operation_begin(Operation *o, Access *all, int count);
void operation_end(const Operation *o);
