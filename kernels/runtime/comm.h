/* Ranks. mpirun starts one process per device; MPI gives rank and size and carries small host values. What concerns device memory is
 * in kernels/collectives.h. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/runtime/mesh.h"

void comm_start (int *argc, char ***argv);      /* rank and size are known after it */
void comm_finish(void);
int  comm_rank  (void);
int  comm_size  (void);
int  comm_local_rank(void);                     /* among the ranks of this host */
int  comm_local_size(void);

/* `call` is called in front of the operations on host values below, in which the host waits for other ranks, with what that is;
 * NULL: nothing is. */
void comm_set_before_waiting(void (*call)(const char *operation));

/* Zeroed memory that the ranks of this host share, until comm_finish. All ranks call, once. */
void *comm_host_memory(size_t bytes);

/* Devices that are connected, as comm_init does. finish: disconnects them. error: what they have met since; NULL: nothing. */
void comm_set_device(void (*finish)(void), const char *(*error)(void));
void comm_device_finish(void);                  /* disconnects them, for another mesh; part of comm_finish */
const char *comm_device_error(void);            /* NULL: none. Any thread may ask */

/* The mesh of ranks, the same on all of them; devices are connected after it. Until then each rank is a replica of one shard. */
void comm_set_mesh  (Mesh m);
int  comm_group_size(Ranks g);
int  comm_group_rank(Ranks g);                  /* this rank's place in its group */
int  comm_group     (Ranks g);                  /* which group it is in: a number that no other group of g has */

/* Host values, over MPI. All ranks must call. */
void comm_barrier  (void);
void comm_broadcast(void *data, size_t bytes, int root);
void comm_sum      (double *x, int n);          /* x = sum over ranks, the same bits on every rank */
void comm_sum_over (double *x, int n, Ranks g); /* the same over the ranks of a group, which must call */
void comm_max      (double *x, int n);
void comm_gather   (void *all, const void *own, size_t bytes, Ranks g);     /* all: (ranks of g) x bytes, in the order of ranks */

/* Unless this hash of what ranks have read is the same on all, dies, naming a rank and its host; `what` they read. Ranks with other
 * files or settings would train a mixture, or wait for each other for ever. disagreement: returns the message, malloc'ed; NULL: all
 * agree. */
void  comm_agree       (const char *what, uint64_t hash);
char *comm_disagreement(const char *what, uint64_t hash);
