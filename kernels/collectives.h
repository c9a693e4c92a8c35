/* Collectives on device memory, over NCCL (CUDA) or MPI (CPU), ordered after earlier work of the
 * current queue. All ranks of a group issue the same operations in the same order, queue by queue.
 * In a group of one rank a sum or maximum is x itself. */
#pragma once
#include "kernels/runtime/comm.h"
#include "kernels/tensor.h"

void comm_init(void); /* call it after device_init and comm_set_mesh */

/* x (n) = sum or maximum over the ranks of g. Sums: F32 or BF16; maxima: F32 only. */
void comm_all_reduce(Tensor x, Ranks g);
void comm_all_reduce_max(Tensor x, Ranks g);

/* Reduce-scatter: each rank of g has a `whole` (W n) of W slices; part (n) = the sum of this rank's
 * slice over the ranks. part may be that slice. Shapes of tensor_flat: n may exceed 2^31. */
void comm_reduce_scatter(Tensor part, Tensor whole, Ranks g);

/* All-gather: slice r of whole = the part of rank r of g. Parts have `bytes` bytes. part may be
 * this rank's slice of whole. g: RANKS_SHARD, RANKS_STAGE or RANKS_TENSOR. */
void comm_all_gather(void *whole, const void *part, size_t bytes, Ranks g);

/* All-to-all over RANKS_CONTEXT. This rank sends to rank r the rows of x in the ranges sent[r *
 * items ... r * items + items - 1]. It writes what it gets from rank r to the rows of y in the
 * ranges received[r * items ...], range by range. A range and its counterpart have the same number
 * of rows, maybe 0. Other rows of y do not change. */
void comm_exchange(Tensor y, const RowRange *received, Tensor x, const RowRange *sent, int items);

/* Messages between neighbours in RANKS_PIPELINE, whose stages form a ring. x: F32 or BF16, with the
 * same shape on both sides. Messages to a neighbour arrive in order. A receive ends when x has
 * arrived. A send may wait until the neighbour receives, so sends have a queue of their own; after
 * it, x may change. */
typedef enum { NEXT_STAGE, PREVIOUS_STAGE, NUM_NEIGHBOURS } Neighbour;
void comm_send(Tensor x, Neighbour to);
void comm_receive(Tensor x, Neighbour from);

/* Device memory, zeroed, in which collectives are fastest, if both tensors are in it. FOR_WEIGHTS:
 * all-gathers over RANKS_SHARD and RANKS_STAGE. FOR_ACTIVATIONS: all-gathers over RANKS_TENSOR, and
 * exchanges. The tensors of an all-gather must have the same offsets on all ranks; so the ranks of
 * RANKS_STAGE (weights) or RANKS_TENSOR (activations) allocate the same number of bytes. At most
 * one allocation per use exists at a time. All ranks call both functions. */
typedef enum { FOR_WEIGHTS, FOR_ACTIVATIONS, NUM_MEMORY_USES } MemoryUse;
void *comm_alloc(size_t bytes, MemoryUse use);
void comm_free(void *p);
