/* Plans the head. */
#pragma once
#include "model/shape/buffers.h"

/* Plans the buffers of logits and losses. */
void plan_head(Arena *arena, Model *m, const Config *c);
