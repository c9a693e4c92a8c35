/* Pipeline stages have consecutive units on different ranks; micro-batches pass the stages one
 * after the other. These are pure functions of a few numbers.
 *
 * p stages have v chunks each [Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2]. A chunk consists
 * of consecutive units; chunk k of stage s is number k p + s from the embedding to the head. So the
 * stages form a ring, in which activations go forward and gradients backward. A schedule defines
 * how many forward passes a stage makes before its first backward pass; then the stage alternates:
 *
 *     1F1B, 2 stages, 3 micro-batches          stage 0   F0 F1 B0 F2 B1    B2
 *                                              stage 1      F0 B0 F1 B1 F2 B2
 *
 * With chunks, groups of p micro-batches go through one chunk after the other. With PIPELINE_ONE,
 * and if p does not divide the number of micro-batches, as in evaluations, a group has one
 * micro-batch.
 *
 * The last chunk of the model does the backward pass of a micro-batch right after its forward pass,
 * in every schedule. */
#pragma once
#include "model/shape/config.h"

/* The position of a stage in a run. Without stages: { 1, 0, 1, ... }. */
typedef struct {
    int stages, stage, chunks;
    PipelineSchedule schedule;
    int micro_batches; /* number of micro-batches of a step, on each stage */
} Pipeline;

/* One pass of a micro-batch through a chunk. */
typedef struct {
    bool backward;
    int micro, chunk;
} PipelineRow;

/* Writes the passes of the stage in a step, in order. Returns the number of rows: 2 x chunks x
 * micro_batches. */
int pipeline_rows(PipelineRow *rows, const Pipeline *p);

/* The maximum number of micro-batches that have passed the chunk forward, but not yet backward. */
int pipeline_in_flight(const Pipeline *p, int chunk);

/* Units [first, end) of a chunk of this stage. Blocks are divided evenly. The first chunk of the
 * model also has the units before the blocks, and the last chunk has the head. With tied embeddings
 * the last stage also holds the embedding, with the same weights, gradients and states as the first
 * stage (stages_sum_tied of stages.h). */
typedef struct {
    int first, end;
} UnitRange;
UnitRange pipeline_units(const Pipeline *p, const ModelConfig *c, int chunk);
/* Whether the stage holds the unit: in a chunk, or as its tied head. */
bool pipeline_holds(const Pipeline *p, const ModelConfig *c, int unit);
/* the stage that has the unit */
int pipeline_stage_of(const Pipeline *p, const ModelConfig *c, int unit);

/* Whether this chunk of this stage is the first, or the last, chunk of the model. */
bool pipeline_is_first(const Pipeline *p, int chunk);
bool pipeline_is_last(const Pipeline *p, int chunk);

/* Returns the share of a step in which a stage waits for other stages, if all passes take the same
 * time: (p - 1) / (v m + p - 1), or (p - 1) / p with one micro-batch after the other. */
double pipeline_bubble(const Pipeline *p);
