/* Tables of the rotary position embedding, on the host. */
#pragma once
#include "model/shape/config.h"

/* table (T, D/2, 2): cosine and sine of the rotation angle of pair i of a head at position t.
 * ROTATION_SCALED: for blocks whose frequencies are changed by the configuration's rope_scaling;
 * YaRN also multiplies cosine and sine. */
void rope_table(float *table, const ModelConfig *c, Rotation rotation, int T);

/* YaRN's factor of cosine and sine, so that scores are multiplied by its square: a lower
 * temperature of the softmax [Peng et al. 2023, YaRN, sec. 3.4]. 1 for other types. */
double rope_attention_factor(const ModelConfig *c);
