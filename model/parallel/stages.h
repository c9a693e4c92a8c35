/* What a pipeline stage (pipeline.h) exchanges with its neighbours, and the activations of each
 * micro-batch in flight.
 *
 *     forward    receive -> unit_acts[first].attn_res ... unit_acts[end].attn_res -copy-> outgoing[NEXT_STAGE] -send->
 *     backward   receive -> work.dres               ... work.dres               -copy-> outgoing[PREVIOUS_STAGE] -send->
 *
 * The compute queue receives messages. Another queue sends them, and waits for the neighbour. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

/* Between stages_enter and watchdog_set_stage(-1), a rank does not wait for all other ranks: its
 * watchdog marks belong to its stage. */
void stages_enter(const ParamStore *store);

/* The first rank of the last stage, which has the head. */
int stages_head_rank(const ParamStore *store);

/* Makes the units of a chunk of this stage read and write the activations of set `set`. */
void stages_use_set(Model *m, int set);

/* stages_use_set for micro-batch r.micro of a step. Before a forward pass, copies scale_amax from
 * the set of micro-batch r.micro - 1 to the set of this micro-batch. The older set keeps its
 * values, because the backward pass of micro-batch r.micro - 1 needs them. */
void stages_use(Model *m, const ParamStore *store, UnitRange units, PipelineRow r);

/* Receives the stream that the chunk reads. */
void stages_receive_stream(Model *m, const ParamStore *store, UnitRange units);
/* Receives the gradient of the stream that the chunk wrote. */
void stages_receive_gradient(Model *m, const ParamStore *store, UnitRange units);

/* With tied embeddings, call after the backward passes of a step. The first stage has the gradient
 * of the embedding, the last stage the gradient of the head. Both stages get the sum, with the same
 * bits. Uses stages_tied_bytes of store->staging. */
void stages_sum_tied(ParamStore *store);
size_t stages_tied_bytes(const ParamStore *store);

/* Sends the stream that the chunk wrote, which may be overwritten afterwards. */
void stages_send_stream(Model *m, const ParamStore *store, UnitRange units);
/* Sends the gradient of the stream that the chunk read. The gradient may be overwritten
 * afterwards. */
void stages_send_gradient(Model *m, const ParamStore *store, UnitRange units);
