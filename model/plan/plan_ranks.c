#include "model/plan/plan_ranks.h"

#include "model/parallel/context.h"
#include "model/plan/plan.h"

void plan_ranks_context(Model *m)
{
    const Attention own = context_attention(&m->text, m->text.attn);
    const int HD = own.H * own.D, S = HD + 2 * own.K * own.D, rows = m->text.context * m->text.rows;
    const Format f = m->text.recipe.residual;
    BackwardScratch *t = &m->text.work;
    if (m->text.context == 1)
        return;
    t->exchanged = plan_shared_rows(m, BUFFER_exchanged, f, rows, S);
    t->qkv_heads = plan_shared_rows(m, BUFFER_qkv_heads, f, rows, S);
    t->attn_out_heads = plan_shared_rows(m, BUFFER_attn_out_heads, f, rows, HD);
    if (m->text.forward_only)
        return;
    t->datt_heads = plan_shared_rows(m, BUFFER_datt_heads, f, rows, HD);
    t->dqkv_heads = plan_shared_rows(m, BUFFER_dqkv_heads, f, rows, S);
}

void plan_ranks_tensor(Model *m)
{
    if (m->text.tensor_ranks == 1)
        return;
    if (row_parts(&m->text) > 1 &&
        (format_is_fp8(m->text.recipe.operand) || format_is_fp8(m->text.recipe.gradient)))
        m->text.work.own = plan_shared_rows(m, BUFFER_own, (Format){ F32, 0, false }, m->text.N,
                                            m->text.config->d_model);
    m->text.work.partial = plan_shared_rows(m, BUFFER_partial, m->text.recipe.residual,
                                            m->text.rows, m->text.config->d_model);
}
