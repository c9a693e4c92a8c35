/* The optimizer's states as a checkpoint stores them, where the run keeps them in other formats: after a change of the recipe, or
 * of adamw to adamw8bit or back. */
#pragma once
#include "model/checkpoint/layout.h"

typedef struct {
    Optimizer optimizer;       /* the run's, its states in the formats of the files */
    Layout    layout;          /* of that */
    bool      converts;        /* a state has 8-bit codes in the files or here, and another format on the other side */
} StoredStates;

/* How the `count` files of `source` store the states of f's optimizer, all of which they have. The formats follow from the types
 * and, for groups, from the number of scales. Dies on one that fits no format. */
StoredStates stored_states(const Fsdp *f, SafeFile *const *source, int count);
void         stored_states_free(StoredStates *s);

/* Reads this rank's part of every state: as layout_read, or where `converts`, decoded to F32 and stored as tensor_store does it, on
 * the host. Equal formats keep their bits. Errors as in layout_read. The ranks of a shard group all call. */
void         stored_states_read(StoredStates *s, Fsdp *f, SafeFile *const *source, int count);
