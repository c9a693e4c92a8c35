/* Saved activations on the host [Rhu et al. 2016, vDNN, arXiv 1602.08124]. What forward saves of a block is one piece of memory, a
 * slot. If there are fewer slots than blocks, a block's piece goes to the host after its forward pass and comes
 * back before its backward pass, on queues of their own:
 *
 *     block l is in slot l % slots;   blocks from L - slots on never leave
 *     forward of block l   waits until block l + 1 - slots has left: it writes its own slot and the next block's input
 *     backward of block l  queues the fetch of block l + 2 - slots into the slot of block l + 2, whose backward pass is over; the
 *                          slot of block l + 1 is not free yet, since recomputing a block writes the next block's input
 *
 * Blocks below the first trained unit have no backward pass and do not leave. Passes without a backward pass move nothing. */
#pragma once
#include "model/buffers.h"
#include "model/fsdp.h"

enum { MIN_SLOTS = 3 };

/* Bytes of host memory that the model's saved activations take. */
size_t offload_host_bytes(const Model *m);

/* Allocates that host memory; and the end of it. */
void   offload_place(Model *m);
void   offload_rehearse(Model *m, void *host);          /* `host` is that memory, or an address of none */
void   offload_free (Model *m);

/* Before and after unit u's forward pass, if a backward pass follows; before its backward pass. */
void   offload_before_forward (Model *m, const ParamStore *f, int u);
void   offload_after_forward  (Model *m, const ParamStore *f, int u);
void   offload_before_backward(Model *m, const ParamStore *f, int u);
