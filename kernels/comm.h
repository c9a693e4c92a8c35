/* Ranks. mpirun starts one process per device; MPI gives rank and size and carries small host values.
 * Collectives on device memory run over NCCL (CUDA) or MPI (CPU), in order with the kernels queued before and after. */
#pragma once
#include "kernels/mesh.h"
#include "kernels/tensor.h"

void comm_start (int *argc, char ***argv);      /* MPI only: rank and size are known after it */
void comm_init  (void);                         /* device collectives; after device_init */
void comm_finish(void);
void comm_device_finish(void);                  /* the back end's part of comm_finish */
int  comm_rank  (void);
int  comm_size  (void);
int  comm_local_rank(void);                     /* among the ranks of this host */
int  comm_local_size(void);

/* `call` is called in front of the operations on host values below, in which the host waits for other ranks, with what that is;
 * NULL: nothing is. */
void comm_set_before_waiting(void (*call)(const char *operation));

/* Zeroed memory that the ranks of this host share, until comm_finish. All ranks call, once. */
void *comm_host_memory(size_t bytes);
const char *comm_device_error(void);            /* of the back end, met since; NULL: none. Any thread may ask */

/* The mesh of ranks, the same on all of them; comes before comm_init. Until then each rank is a replica of one shard. */
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

/* Device memory, in order with what the current queue did before. All ranks of a group issue the same operations in the same
 * order, queue by queue. In a group of one rank a sum or maximum is x itself. */

/* x (1,n) = sum, or maximum, over the ranks of g; F32 or BF16, a maximum F32 alone. */
void comm_all_reduce    (Tensor x, Ranks g);
void comm_all_reduce_max(Tensor x, Ranks g);

/* RANKS_SHARD: part (1,n) = sum over ranks of slice `own rank` of their whole (1, W n). */
void comm_reduce_scatter(Tensor part, Tensor whole);

/* RANKS_SHARD: slice r of whole = rank r's part, of `bytes`; in place if part is this rank's slice. Fastest where both lie in one
 * comm_alloc, at the same place on all ranks. */
void comm_all_gather(void *whole, const void *part, size_t bytes);

/* Device memory that comm_all_gather reads and writes fastest. One piece at a time; all ranks call both. */
void *comm_alloc(size_t bytes);
void  comm_free (void *p);
