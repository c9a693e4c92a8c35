/* Which tensor ranks a run can have. */
#pragma once
#include "model/config/reader.h"

/* Returns why c->strategy.tensor_ranks of `world` ranks cannot compute layers together, and what to
 * do, malloc'ed; NULL: the ranks can. */
char *check_tensor_ranks_refusal(const Config *c, int world);
void check_tensor_ranks(Reader *r);
