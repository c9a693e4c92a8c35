/* Collectives on device memory, over NCCL (CUDA) or MPI (CPU), ordered after earlier work of the
 * current queue. All ranks of a group issue the same operations in the same order, queue by queue.
 * In a group of one rank a sum or maximum is x itself. */
#pragma once
#include "kernels/runtime/comm.h"
#include "kernels/tensor.h"

void comm_init(void); /* after device_init and comm_set_mesh */

/* x (n) = sum or maximum over the ranks of g. Sums: F32 or BF16; maxima: F32 only. */
void comm_all_reduce(Tensor x, Ranks g);
void comm_all_reduce_max(Tensor x, Ranks g);

/* part (n) = sum over the ranks of g of slice `own rank` of their whole (W n); in place if part is
 * that slice. Shapes of tensor_flat: n may exceed 2^31. */
void comm_reduce_scatter(Tensor part, Tensor whole, Ranks g);

/* Slice r of whole = the part, of `bytes`, of rank r of g; in place if part is this rank's slice.
 * g: RANKS_SHARD, RANKS_STAGE or RANKS_TENSOR. */
void comm_all_gather(void *whole, const void *part, size_t bytes, Ranks g);

/* RANKS_CONTEXT, of c ranks: rank r gets the rows of x in its ranges sent[r * items .. + items -
 * 1], and what it sends is put into the rows of y in received[r * items .. + items - 1], range by
 * range; they have as many rows, and may have none. The other rows of y stay as they are. */
void comm_exchange(Tensor y, const RowRange *received, Tensor x, const RowRange *sent, int items);

/* RANKS_PIPELINE, whose stages form a ring. comm_send sends x, F32 or BF16, to a neighbour;
 * comm_receive gets what it sent. Messages of a stage to a neighbour arrive in their order, in each
 * direction, and sender and receiver have the same shape. A receive ends when x is there; x may
 * change after a send, which may wait until the neighbour receives: so sends have a queue of their
 * own. */
typedef enum { NEXT_STAGE, PREVIOUS_STAGE, NUM_NEIGHBOURS } Neighbour;
void comm_send(Tensor x, Neighbour to);
void comm_receive(Tensor x, Neighbour from);

/* Device memory, zeroed, in which collectives are fastest. FOR_WEIGHTS: all-gathers over
 * RANKS_SHARD and RANKS_STAGE. FOR_ACTIVATIONS: all-gathers over RANKS_TENSOR, and exchanges. They
 * are fastest if both tensors lie in it. Those of an all-gather must then have the same offsets on
 * all ranks; so the ranks of RANKS_STAGE (weights) or RANKS_TENSOR (activations) allocate the same
 * number of bytes. One allocation of a use at a time; all ranks call both functions. */
typedef enum { FOR_WEIGHTS, FOR_ACTIVATIONS, NUM_MEMORY_USES } MemoryUse;
void *comm_alloc(size_t bytes, MemoryUse use);
void comm_free(void *p);
