/* Plans the buffers of ranks that compute a micro-batch together. */
#pragma once
#include "model/shape/buffers.h"

/* Plans the buffers of context ranks. A forward pass without backward needs some of them, too. */
void plan_ranks_context(Model *m);
/* Plans the buffers of tensor ranks. */
void plan_ranks_tensor(Model *m);
