/* Ranks. mpirun starts one process per device. MPI gives rank and size, and transfers small host
 * values. kernels/collectives.h transfers device memory. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/runtime/mesh.h"

void comm_start(int *argc, char ***argv); /* makes rank and size known */
void comm_finish(void);
int comm_rank(void);
int comm_size(void);
int comm_local_rank(void); /* rank among the ranks of this host */
int comm_local_size(void);

/* Returns zeroed memory that the ranks of this host share until comm_finish. All ranks call this
 * function, once. */
void *comm_host_memory(size_t bytes);

/* Called by comm_init when devices are connected. `finish` disconnects the devices. `error` returns
 * an error of their communication; NULL: no error. */
void comm_set_device(void (*finish)(void), const char *(*error)(void));
/* disconnects the devices before the mesh changes; comm_finish calls this function too */
void comm_device_finish(void);
const char *comm_device_error(void); /* NULL: no error; any thread may call it */

/* Sets the mesh of ranks, which is the same on all ranks. Devices are connected after this call.
 * Before this call, each rank is a replica of one shard. */
void comm_set_mesh(Mesh m);
int comm_group_size(Ranks g);
int comm_group_rank(Ranks g); /* this rank's index in its group */
/* number of this rank's group, unique among the groups of g */
int comm_group(Ranks g);

/* The ranks of RANKS_SHARD on this host: RANKS_NEAR, or RANKS_SHARD if its ranks are on one host. */
Ranks comm_near(void);

/* Until comm_pretend(NULL, 0), groups are those of rank `as` of mesh m, and the functions for host
 * values below do nothing. comm_pretend serves plans for ranks that were not started. */
void comm_pretend(const Mesh *m, int as);

/* Bytes that this rank has sent to other ranks since the start, if collectives run as rings. In a
 * ring of W ranks, a rank sends its slice W - 1 times for an all-gather or a reduce-scatter, and
 * twice as many bytes for an all-reduce. */
typedef enum {
    SENT_GATHERS,
    SENT_SCATTERED_SUMS,
    SENT_SUMS,
    SENT_EXCHANGES, /* of activations, over RANKS_CONTEXT */
    SENT_CODES,     /* exchanges of gradients */
    SENT_MESSAGES,
    SENT_HOST_VALUES,
    NUM_SENT
} Sent;
/* bytes: the size of the tensor; for an all-gather or a reduce-scatter, the size of a slice; for an
 * exchange, the bytes that leave this rank */
size_t comm_ring_bytes(Sent what, size_t bytes, int ranks);
static inline Sent comm_sent_as(Ranks exchange)
{
    return exchange == RANKS_CONTEXT ? SENT_EXCHANGES : SENT_CODES;
}
/* called by back ends when they have queued such an operation */
void comm_count(Sent what, size_t bytes, Ranks g);
size_t comm_sent(Sent what);

/* Host values, over MPI. All ranks must call these functions. Each call is a mark of
 * watchdog_marks.h. */
void comm_barrier(void);
void comm_broadcast(void *data, size_t bytes, int root);
/* x = the sum over all ranks; all ranks get the same bits */
void comm_sum(double *x, int n);
/* as comm_sum, over the ranks of a group; all of these ranks must call it */
void comm_sum_over(double *x, int n, Ranks g);
void comm_max(double *x, int n);
/* all: (ranks of g) values of `bytes` bytes, in the order of ranks */
void comm_gather(void *all, const void *own, size_t bytes, Ranks g);

/* Dies unless all ranks call it with the same hash of what they have read. The message contains
 * `what` ("configurations") and names a rank with a different hash and its host. Ranks with
 * different files or settings would train on a mixture, or wait for each other for ever.
 * comm_disagreement returns the message, malloc'ed; NULL: all ranks agree. */
void comm_agree(const char *what, uint64_t hash);
char *comm_disagreement(const char *what, uint64_t hash);
