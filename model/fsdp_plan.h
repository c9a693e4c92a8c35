/* What the verbs ask about the placement. */
#pragma once
#include "model/fsdp.h"

WeightSlot *weight_slot(const Fsdp *f, int unit);      /* NULL: the master weights are the weights */
GradSlot   *grad_slot  (const Fsdp *f, int unit);      /* NULL: gradients are added to the shard's */
bool        is_gathered(const Fsdp *f, int unit, const Param *p);      /* p stands in the unit's slot */
bool        is_dense   (const Fsdp *f, int unit, const Param *p);      /* ... in f->dense */
