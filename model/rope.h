/* The angles of the rotary position embedding, on the host. */
#pragma once
#include "model/config.h"

/* table (T, D/2, 2): cosine and sine of the angle by which pair i of a head turns at position t. */
void rope_table(float *table, const ModelConfig *c, int T);
