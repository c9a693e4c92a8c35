/* What a pipeline stage (pipeline.h) exchanges with its neighbours, and its micro-batches in
 * flight.
 *
 *     forward    receive -> unit_acts[first].attn_res ... unit_acts[end].attn_res -copy-> outgoing[NEXT_STAGE] -send->
 *     backward   receive -> work.dres               ... work.dres               -copy-> outgoing[PREVIOUS_STAGE] -send->
 *
 * Messages are received on the compute queue and sent on a queue of their own, which waits for the
 * neighbour. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

/* Between stages_enter and watchdog_leave_stage a rank does not wait for all others: its marks are
 * those of its stage. */
void stages_enter(const ParamStore *store);

/* The first rank of those that have the head, of the last stage. */
int stages_head_rank(const ParamStore *store);

/* The units of a chunk of this stage read and write the activations of set `set`. */
void stages_use_set(Model *m, int set);

/* The same for micro-batch r.micro of a step. Before its forward pass its set gets a copy of the
 * amaxes of micro-batch r.micro - 1, whose own set keeps them for its backward pass. */
void stages_use(Model *m, const ParamStore *store, UnitRange units, PipelineRow r);

/* The stream that the chunk reads; the gradient of the stream that it wrote. */
void stages_receive_stream(Model *m, const ParamStore *store, UnitRange units);
void stages_receive_gradient(Model *m, const ParamStore *store, UnitRange units);

/* After the backward passes of a step: if the head is the embedding, the gradients on the first
 * stage, which the embedding makes, and on the last, which the head makes, become their sum, the
 * same bits on both. Uses store->staging, of stages_tied_bytes. */
void stages_sum_tied(ParamStore *store);
size_t stages_tied_bytes(const ParamStore *store);

/* The stream that the chunk wrote; the gradient of the stream that it read. They may be overwritten
 * afterwards. */
void stages_send_stream(Model *m, const ParamStore *store, UnitRange units);
void stages_send_gradient(Model *m, const ParamStore *store, UnitRange units);
