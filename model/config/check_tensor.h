/* Which tensor ranks a run can have. */
#pragma once
#include "model/shape/config.h"

/* Why c->strategy.tensor_ranks of `world` ranks cannot compute layers together, and what to do:
 * malloc'ed; NULL: they can. */
char *tensor_refusal(const Config *c, int world);
