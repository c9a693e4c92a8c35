/* Ranks. mpirun starts one process per device; MPI gives rank and size and carries small host values.
 * Collectives on device memory run over NCCL (CUDA) or MPI (CPU), in order with the kernels queued before and after. */
#pragma once
#include "model/tensor.h"

void comm_start (int *argc, char ***argv);      /* MPI only: rank and size are known after it */
void comm_init  (void);                         /* device collectives; after device_init */
void comm_finish(void);
void comm_device_finish(void);                  /* the back end's part of comm_finish */
int  comm_rank  (void);
int  comm_size  (void);
int  comm_local_rank(void);                     /* among the ranks of this host */
int  comm_local_size(void);

/* Host values, over MPI. All ranks must call. */
void comm_barrier  (void);
void comm_broadcast(void *data, size_t bytes, int root);
void comm_sum      (double *x, int n);          /* x = sum over ranks, the same bits on every rank */
void comm_max      (double *x, int n);

/* Device tensors (F32 or BF16): x = sum over ranks. Does nothing with one rank. */
void comm_all_reduce(Tensor x);
