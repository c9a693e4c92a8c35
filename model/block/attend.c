#include "model/block/attend.h"

#include "model/parallel/context.h"

void attend(const Model *m, const Acts *a)
{
    if (a->cache.k.data)
        attention_cached(a->attn_out, a->qkv_rotated, a->cache, a->attn);
    else if (context_attends_whole(m)) {
        const Tensor qkv = context_heads(m, a, m->work.qkv_heads, a->qkv_rotated);
        const Tensor mix = context_buffer(m, m->work.attn_out_heads, a->attn_out);
        attention_forward(mix, a->lse, qkv, a->heads, m->docs);
        context_tokens(m, a, a->attn_out, mix);
    }
    if (m->own_docs.count > 0)
        attention_forward(a->attn_out, a->own_lse, a->qkv_rotated, a->attn, m->own_docs);
}

void attend_backward(const Model *m, const Acts *a)
{
    const BackwardScratch *t = &m->work;
    if (context_attends_whole(m)) {
        const Tensor dy = context_heads(m, a, t->datt_heads, t->datt),
                     qkv = context_heads(m, a, t->qkv_heads, a->qkv_rotated);
        const Tensor mix = context_heads(m, a, t->attn_out_heads, a->attn_out),
                     dqkv = context_buffer(m, t->dqkv_heads, t->dqkv);
        attention_backward(dqkv, dy, qkv, mix, a->lse, a->heads, m->docs);
        context_tokens(m, a, t->dqkv, dqkv);
    }
    if (m->own_docs.count > 0)
        attention_backward(t->dqkv, t->datt, a->qkv_rotated, a->attn_out, a->own_lse, a->attn,
                           m->own_docs);
}
