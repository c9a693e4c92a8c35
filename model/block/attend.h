/* Attention of a block: on one rank, or by context ranks that exchange tokens for heads
 * (context.h). */
#pragma once
#include "model/shape/buffers.h"

/* attn_out from qkv_rotated: of the micro-batch, or with a cache also of the tokens before it. */
void attend(const Stream *stream, const Acts *a);
/* stream->work.dqkv from stream->work.datt. */
void attend_backward(const Stream *stream, const Acts *a);
