/* The plan of the head. */
#pragma once
#include "model/shape/buffers.h"

/* The buffers of its logits and losses. */
void plan_head(Arena *arena, Model *m, const Config *c);
