/* The angles of the rotary position embedding, on the host. */
#pragma once
#include "model/config.h"

/* table (T, D/2, 2): cosine and sine of the angle by which pair i of a head turns at position t. `scaled`: in blocks whose
 * frequencies are changed as the configuration's rope_scaling says; YaRN multiplies cosine and sine as well. */
void rope_table(float *table, const ModelConfig *c, bool scaled, int T);

/* What YaRN multiplies cosine and sine by, and scores by its square: a lower temperature of the softmax [Peng et al. 2023, YaRN,
 * sec. 3.4]. 1 for other types. */
double rope_attention_factor(const ModelConfig *c);
