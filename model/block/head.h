/* The last unit: final norm, head and loss. */
#pragma once
#include "model/shape/buffers.h"
#include "model/store/fsdp.h"

/* Adds the losses of the stream in the unit's attn_res to the sums. With `backward`, also computes
 * the gradients of scale * (sum of losses + z_weight * sum of z-losses): the gradients of the
 * head's weights and, if an earlier unit is trained, of the stream (in work.dres). */
void head_losses(Model *m, ParamStore *store, float scale, float z_weight, bool backward);

/* Computes the logits of row `row` of the stream and writes them to the first row of m->logits. */
void head_logits(Model *m, ParamStore *store, int row);
