/* The attention of a block: on one rank, or on context ranks, which exchange tokens for heads
 * (context.h). */
#pragma once
#include "model/shape/buffers.h"

/* Computes attn_out from qkv_rotated: of the micro-batch or, with a cache, also of the tokens
 * before it. */
void attend(const Stream *stream, const Acts *a);
/* Computes stream->work.dqkv from stream->work.datt. */
void attend_backward(const Stream *stream, const Acts *a);
