/* Tables of the rotary position embedding, on the host. */
#pragma once
#include "model/shape/config.h"

/* table (T, D/2, 2): cosine and sine of the rotation angle of pair i of a head at position t.
 * ROTATION_SCALED: rope_scaling of the configuration changes the frequencies. With YaRN, cosine and
 * sine are also multiplied by rope_attention_factor. */
void rope_table(float *table, const ModelConfig *c, Rotation rotation, int T);

/* YaRN's factor of cosine and sine. So attention scores are multiplied by the square of this
 * factor, which lowers the temperature of the softmax [Peng et al. 2023, YaRN, sec. 3.4]. 1 for
 * other types. */
double rope_attention_factor(const ModelConfig *c);
