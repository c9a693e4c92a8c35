/* Loads optimizer states whose formats in the checkpoint differ from those of the run: after a
 * change of the recipe, or between adamw and adamw8bit. In early versions adamw8bit had 8-bit
 * states of all weights. */
#pragma once
#include "model/checkpoint/layout.h"

typedef struct {
    /* the run's optimizer; states to be converted have the formats of the files */
    Optimizer optimizer;
    Layout layout; /* layout of that optimizer's states */
    /* a state must be converted: its formats differ, and at least one has 8-bit codes */
    bool converts;
} StoredStates;

/* Finds the formats in which the `count` files store the states of the store's optimizer; all
 * states must exist. A format follows from the types and, for groups, from the number of scales.
 * Dies if no format fits. */
StoredStates stored_states(const ParamStore *store, SafeFile *const *files, int count);
void stored_states_free(StoredStates *s);

/* Reads this rank's slice of every state, as layout_read does. A state in another format is decoded
 * to F32 and encoded by tensor_store, on the host; a state in the same format keeps its bits. Dies
 * on the errors of layout_read. All ranks of a shard group must call this. */
void stored_states_read(StoredStates *s, ParamStore *store, SafeFile *const *files, int count);
