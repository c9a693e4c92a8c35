/* Saved activations on the host [Rhu et al. 2016, vDNN, arXiv 1602.08124]. What forward saves of a
 * block for a micro-batch is one piece of memory, in a slot. If there are fewer slots than pieces,
 * a piece goes to the host after its forward pass and comes back before its backward pass, on
 * queues of their own. The order of passes is known before the first one (pipeline.h), and so is
 * the next pass in each slot:
 *
 *     a pass of block l uses its own slot, and that of block l + 1 of its chunk: it writes or, recomputing, overwrites its input
 *     after a forward pass    the piece leaves, unless the next pass in its slot is its own backward pass
 *     before a pass           compute waits until what was in its slots has left, and until its own piece is back
 *     after a pass            each of its slots gets the piece whose backward pass is the next there
 *
 * Blocks below the first trained unit have no backward pass and do not leave. Passes without a
 * backward pass move nothing.
 *
 * With one micro-batch in flight the blocks have the slots in turn, so that the last ones never
 * leave. Three slots let copies overlap: one block computes, one leaves or comes, and one has the
 * next input. With more in flight, in stages, the backward pass of another set follows a forward
 * pass, and needs a fourth slot; slots after the fourth belong to one piece each, which never
 * leaves. The host has a place for each piece that leaves. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

enum { MIN_SLOTS = 3 };

/* The fewest slots with which copies overlap. */
int offload_least_slots(const Model *m);

/* The pieces: blocks of this stage times micro-batches in flight. */
int offload_pieces(const Model *m, const ParamStore *store);

/* Chooses the slot of each piece, if there are fewer slots than pieces. */
void offload_plan_slots(Model *m, const ParamStore *store);

/* offload_plan: once all pieces have sizes, counts those that leave (offload.leaving) and gives
 * each a place in host memory. offload_host_bytes: the bytes of all these places. */
void offload_plan(Model *m, const ParamStore *store);
size_t offload_host_bytes(const Model *m);

/* Allocates that host memory; and the end of it. */
void offload_alloc(Model *m);
/* `host` is that memory, or an address without memory */
void offload_place(Model *m, void *host);
void offload_free(Model *m);

/* Around these rows of passes, forward and backward. */
void offload_begin(Model *m, const ParamStore *store, const PipelineRow *row, int rows);
void offload_end(Model *m);

/* Before a block's pass, and before what writes its input; after its pass. Other units have
 * none. */
void offload_wait(Model *m);
void offload_moved(Model *m, int u);
