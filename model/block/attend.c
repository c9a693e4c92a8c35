#include "model/block/attend.h"

#include "model/parallel/context.h"

void attend(const Stream *stream, const Acts *a)
{
    if (a->cache.k.data)
        attention_cached(a->attn_out, a->qkv_rotated, a->cache, a->attn);
    else if (context_attends_whole(stream)) {
        const Tensor qkv = context_heads(stream, a, stream->work.qkv_heads, a->qkv_rotated);
        const Tensor attn_out = context_buffer(stream, stream->work.attn_out_heads, a->attn_out);
        attention_forward(attn_out, a->lse, qkv, a->heads, stream->docs);
        context_tokens(stream, a, a->attn_out, attn_out);
    }
    if (stream->own_docs.count > 0)
        attention_forward(a->attn_out, a->own_lse, a->qkv_rotated, a->attn, stream->own_docs);
}

void attend_backward(const Stream *stream, const Acts *a)
{
    const BackwardScratch *t = &stream->work;
    if (context_attends_whole(stream)) {
        const Tensor dy = context_heads(stream, a, t->datt_heads, t->datt),
                     qkv = context_heads(stream, a, t->qkv_heads, a->qkv_rotated);
        const Tensor attn_out = context_heads(stream, a, t->attn_out_heads, a->attn_out),
                     dqkv = context_buffer(stream, t->dqkv_heads, t->dqkv);
        attention_backward(dqkv, dy, qkv, attn_out, a->lse, a->heads, stream->docs);
        context_tokens(stream, a, t->dqkv, dqkv);
    }
    if (stream->own_docs.count > 0)
        attention_backward(t->dqkv, t->datt, a->qkv_rotated, a->attn_out, a->own_lse, a->attn,
                           stream->own_docs);
}
