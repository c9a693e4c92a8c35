/* Offloads saved activations to the host [Rhu et al. 2016, vDNN, arXiv 1602.08124]. A "save" is the
 * set of activations that forward saves for one block and one micro-batch. On the device, a save is
 * in a slot. If there are fewer slots than saves, a save leaves for the host after its forward pass
 * and returns before its backward pass; these copies have their own queues. The order of passes is
 * known in advance (pipeline.h), and so is the next pass in each slot:
 *
 *     a pass of block l     uses its own slot, and the slot of block l + 1, whose input it writes
 * after a forward pass  the save leaves, unless its own backward pass is the next pass in the slot
 *     before a pass         compute waits until the old saves have left its slots, and until its
 *                           own save has returned
 *     after a pass          each of its slots gets the save whose backward pass is next there
 *
 * Blocks below the first trained unit have no backward pass, and their saves do not leave. Without
 * backward passes, no save moves.
 *
 * With one micro-batch in flight, blocks take the slots in turn, and the saves of the last blocks
 * never leave. Three slots let copies overlap with computation: one for the block that computes,
 * one for the save that leaves or returns, and one for the next input. Pipeline stages have more
 * micro-batches in flight: a forward pass is followed by a backward pass of another micro-batch,
 * which needs a fourth slot. Each further slot belongs to one save, which never leaves. The host
 * has space for each save that leaves. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

enum { MIN_SLOTS = 3 };

/* The smallest number of slots with which copies overlap with computation. */
int offload_least_slots(const Model *m);

/* Number of saves: blocks of this stage times micro-batches in flight. */
int offload_saves(const Model *m, const ParamStore *store);

/* Chooses the slot of each save, if there are fewer slots than saves. */
void offload_plan_slots(Model *m, const ParamStore *store);

/* Counts the saves that leave (offload.leaving), and gives each of them an offset in host memory.
 * Call it when all saves have sizes. */
void offload_plan(Model *m, const ParamStore *store);
size_t offload_host_bytes(const Model *m); /* size of this host memory */

/* Allocates the host memory for saves. */
void offload_alloc(Model *m);
/* Uses `host` as the host memory for saves. `host` may be an address without memory. */
void offload_place(Model *m, void *host);
void offload_free(Model *m);

/* Call these before and after passes, forward and backward. */
void offload_begin(Model *m, const ParamStore *store, const PipelineRow *row, int rows);
void offload_end(Model *m);

/* Call it before the pass of a block, and before an operation that writes its input. */
void offload_wait(Model *m);
/* Call it after the pass of unit u. Does nothing if u is not a block. */
void offload_moved(Model *m, int u);
