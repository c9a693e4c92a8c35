/* Collectives on device memory, over NCCL (CUDA) or MPI (CPU). A collective runs after all earlier
 * work of the current queue. All ranks of a group issue the same operations in the same order,
 * queue by queue. In a group of one rank a sum or maximum is x itself. */
#pragma once
#include "kernels/runtime/comm.h"
#include "kernels/tensor.h"

void comm_init(void); /* must follow device_init and comm_set_mesh */

/* x (n) = sum of x over the ranks of g. x is F32 or BF16. */
void comm_all_reduce(Tensor x, Ranks g);
/* x (n) = maximum of x over the ranks of g. x is F32. */
void comm_all_reduce_max(Tensor x, Ranks g);

/* Reduce-scatter. `whole` (W n) consists of W slices, one for each rank of g. part (n) = the sum
 * over the ranks of this rank's slice. part may be that slice of `whole`. Both have the shape of
 * tensor_flat, so n may exceed 2^31. */
void comm_reduce_scatter(Tensor part, Tensor whole, Ranks g);

/* All-gather: slice r of `whole` = the part of rank r of g. Each part has `bytes` bytes. part may
 * be this rank's slice of `whole`. g is RANKS_SHARD, RANKS_STAGE, RANKS_TENSOR or RANKS_REPLICA. */
void comm_all_gather(void *whole, const void *part, size_t bytes, Ranks g);

/* All-to-all over the ranks of g. This rank sends to rank r the rows of x in the ranges sent[r *
 * items ... r * items + items - 1]. This rank writes the rows that it gets from rank r to the
 * ranges received[r * items ...] of y, range by range. The sender's range and the receiver's range
 * have the same number of rows, which may be 0. Other rows of y do not change. */
void comm_exchange(Tensor y, const RowRange *received, Tensor x, const RowRange *sent, int items,
                   Ranks g);

/* Messages between neighbours in RANKS_PIPELINE, whose stages form a ring. x is F32 or BF16 and has
 * the same shape on both ranks. Messages to a neighbour arrive in order. A receive ends when x has
 * arrived. A send may wait until the neighbour receives, so sends have a queue of their own. When
 * the send has ended, x may change. */
typedef enum { NEXT_STAGE, PREVIOUS_STAGE, NUM_NEIGHBOURS } Neighbour;
void comm_send(Tensor x, Neighbour to);
void comm_receive(Tensor x, Neighbour from);

/* Allocates zeroed device memory. A collective is fastest if both of its tensors lie in such
 * memory. FOR_WEIGHTS is for all-gathers over RANKS_SHARD and RANKS_STAGE. FOR_ACTIVATIONS is for
 * all-gathers over RANKS_TENSOR, and for exchanges over RANKS_CONTEXT. FOR_GRADIENTS is for
 * exchanges over comm_near(). The tensors of an all-gather must have the same offsets on all ranks.
 * So the ranks of RANKS_TENSOR (activations) or RANKS_STAGE (others) allocate the same number of
 * bytes. At most one allocation per use exists at a time. All ranks call both functions. */
typedef enum { FOR_WEIGHTS, FOR_ACTIVATIONS, FOR_GRADIENTS, NUM_MEMORY_USES } MemoryUse;
void *comm_alloc(size_t bytes, MemoryUse use);
void comm_free(void *p);
