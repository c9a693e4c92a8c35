/* Ranks. mpirun starts one process per device; MPI gives rank and size and transfers small host
 * values. kernels/collectives.h transfers device memory. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/runtime/mesh.h"

void comm_start(int *argc, char ***argv); /* afterwards rank and size are known */
void comm_finish(void);
int comm_rank(void);
int comm_size(void);
int comm_local_rank(void); /* among the ranks of this host */
int comm_local_size(void);

/* Zeroed memory shared by the ranks of this host until comm_finish. All ranks call it, once. */
void *comm_host_memory(size_t bytes);

/* comm_init registers the connected devices. finish: disconnects them. error: returns their
 * communication error, NULL: none. */
void comm_set_device(void (*finish)(void), const char *(*error)(void));
/* disconnects devices, for another mesh; part of comm_finish */
void comm_device_finish(void);
const char *comm_device_error(void); /* NULL: none. For any thread */

/* The mesh of ranks, the same on all of them; devices are connected after it. Until then each rank
 * is a replica of one shard. */
void comm_set_mesh(Mesh m);
int comm_group_size(Ranks g);
int comm_group_rank(Ranks g); /* this rank's index in its group */
/* a number of its group, unique among the groups of g */
int comm_group(Ranks g);

/* Until comm_pretend(NULL, 0), groups are those of rank `as` of mesh m, and the functions of host
 * values below do nothing: for a plan of ranks that were not started. */
void comm_pretend(const Mesh *m, int as);

/* What this rank has sent to others since the start, in bytes, as a ring of the group's ranks sends
 * it: with W ranks each sends W - 1 times its part for an all-gather or a reduce-scatter, and both
 * for an all-reduce. */
typedef enum {
    SENT_GATHERS,
    SENT_SCATTERED_SUMS,
    SENT_SUMS,
    SENT_EXCHANGES,
    SENT_MESSAGES,
    SENT_HOST_VALUES,
    NUM_SENT
} Sent;
/* bytes: of the tensor; for an all-gather or a reduce-scatter, of a part; for an exchange, what
 * leaves this rank */
size_t comm_ring_bytes(Sent what, size_t bytes, int ranks);
/* back ends: such an operation was queued */
void comm_count(Sent what, size_t bytes, Ranks g);
size_t comm_sent(Sent what);

/* Host values, over MPI. All ranks must call; each call is a mark of watchdog_marks.h. */
void comm_barrier(void);
void comm_broadcast(void *data, size_t bytes, int root);
/* x = sum over ranks, the same bits on every rank */
void comm_sum(double *x, int n);
/* the same over a group, whose ranks must all call */
void comm_sum_over(double *x, int n, Ranks g);
void comm_max(double *x, int n);
/* all: (ranks of g) x bytes, in the order of ranks */
void comm_gather(void *all, const void *own, size_t bytes, Ranks g);

/* Dies unless all ranks have the same hash of `what` they read; the message names a rank and its
 * host. Ranks with different files or settings would train a mixture, or wait for each other for
 * ever. disagreement: returns the message, malloc'ed; NULL: all agree. */
void comm_agree(const char *what, uint64_t hash);
char *comm_disagreement(const char *what, uint64_t hash);
