/* What the verbs ask about the placement. */
#pragma once
#include "model/fsdp.h"

/* Slots that units take turns with (fsdp_plan.c, shared_slot) come first, then one of each unit's own. */
enum { SHARED_SLOTS = 4 };

static inline int num_slots(const Fsdp *f)
{
    return SHARED_SLOTS + f->num_units;
}

WeightSlot *weight_slot(const Fsdp *f, int unit);      /* NULL: the master weights are the weights */
GradSlot   *grad_slot  (const Fsdp *f, int unit);      /* NULL: gradients are added to the shard's */
bool        is_gathered(const Fsdp *f, int unit, const Param *p);      /* p stands in the unit's slot */
bool        is_dense   (const Fsdp *f, int unit, const Param *p);      /* ... in f->dense */
