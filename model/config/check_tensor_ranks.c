/* Checks tensor parallelism: ranks that compute layers together (parallelism.tensor). */
#include "model/config/check_tensor_ranks.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "model/shape/optimizer_table.h"
#include "model/shape/params.h"

/* Refuses settings that tensor ranks do not support, before files are read or written. */
static char *refused_combination(const Config *c)
{
    const struct {
        bool asked;
        const char *what;
    } list[] = {
        { c->tiled_mlp_tokens > 0 && !c->generate,
          "tiled_mlp_tokens: the MLP cannot be computed in tiles, because its tokens come from "
          "several ranks; use --tiled_mlp_tokens=0" },
        { c->model.qk_norm == QK_NORM_WIDTH,
          "q and k are normalized over all heads, but a rank has only some of the heads" },
        { c->model.experts.count > 0,
          "tensor ranks cannot share experts; FSDP, context and pipeline parallelism can" },
        { c->model.image.feature_size > 0,
          "a model with images cannot be divided among tensor ranks" },
        { !config_forward_only(c) && optimizer_find(c->optimizer.name)->orthogonalizes,
          "optimizer.name muon needs whole matrices, but a rank has only parts of them" },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (list[i].asked)
            return xasprintf("%s. Use --parallelism.tensor=1", list[i].what);
    return NULL;
}

/* FP8 GEMMs on GPUs need dimensions that are multiples of 16. Context ranks divide the heads of a
 * tensor rank again, unless the run only generates. */
static char *refused_parts(const Config *c, int n, int world)
{
    enum { MULTIPLE = 16 };
    const ModelConfig *m = &c->model;
    const int context = context_ranks(&c->strategy), ranks = n * context,
              T = m->max_sequence_length;
    const int of_heads = c->generate ? 1 : context;
    const char *and_context = context > 1 ? " with parallelism.context" : "";
    if (world % ranks != 0)
        return xasprintf("%d rank%s cannot form groups of %d%s; start a multiple of %d ranks",
                         world, world == 1 ? "" : "s", ranks, and_context, ranks);
    const ModelConfig part = { .n_heads = m->n_heads / n, .n_kv_heads = m->n_kv_heads / n };
    if (m->n_heads % n != 0 || m->n_kv_heads % n != 0 || !context_divides(&part, of_heads))
        return xasprintf("the model has %d heads and %d key heads, which %d ranks%s cannot share "
                         "equally; use a smaller number",
                         m->n_heads, m->n_kv_heads, n * of_heads, of_heads > 1 ? and_context : "");
    const struct {
        const char *what;
        long width;
    } list[] = {
        { "all query heads together are", (long)m->n_heads * m->head_dim },
        { "each half of the MLP is", m->mlp_width },
        { "q, k and v together are", (m->n_heads + 2L * m->n_kv_heads) * m->head_dim },
    };
    const struct {
        const char *key;
        Format f;
        long width;
    } saved[] = {
        { "format.saved_qkv", c->recipe.saved_qkv,
          (m->n_heads + 2L * m->n_kv_heads) * m->head_dim },
        { "format.saved_attention", c->recipe.saved_attention, (long)m->n_heads * m->head_dim },
        { "format.saved_mlp", c->recipe.saved_mlp, 2L * m->mlp_width },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (list[i].width % (MULTIPLE * n) != 0)
            return xasprintf(
                "%s %ld wide, not a multiple of %d x %d, so a rank's share would not be "
                "a multiple of 16; use a smaller number",
                list[i].what, list[i].width, n, MULTIPLE);
    for (size_t i = 0; i < sizeof saved / sizeof *saved; i++)
        if (saved[i].f.group > 0 && saved[i].width / n % saved[i].f.group != 0)
            return xasprintf("%s is %s, but a rank's row of %ld elements cannot be divided into "
                             "groups of %d; use a "
                             "smaller number",
                             saved[i].key, format_name(saved[i].f), saved[i].width / n,
                             saved[i].f.group);
    /* while generating each rank has all tokens */
    if (!c->generate && T % (MULTIPLE * ranks) != 0)
        return xasprintf("model.max_sequence_length %d is not a multiple of %d x %d, so a rank's "
                         "share of the tokens would not be a multiple of 16; use "
                         "--model.max_sequence_length=%d",
                         T, ranks, MULTIPLE,
                         (T + MULTIPLE * ranks - 1) / (MULTIPLE * ranks) * (MULTIPLE * ranks));
    return NULL;
}

/* Whether two ranks would share a group of elements with one scale. Groups are consecutive along
 * the whole parameter. */
static bool cuts_group(const Param *p, size_t group)
{
    for (int i = 0; i < p->num_projections && p->split == SPLIT_ROWS; i++)
        if ((size_t)p->projection[i].rows * (size_t)p->cols % group != 0)
            return true;
    return p->split == SPLIT_COLUMNS && (size_t)p->cols % group != 0;
}

static char *refused_groups(const Config *c, const UnitLayout *block)
{
    const Optimizer *o = optimizer_find(c->optimizer.name);
    for (int k = 0; k < o->num_states && !config_forward_only(c); k++) {
        const int group = optimizer_format(o, k, &c->recipe, true).group;
        for (const Param *p = block->param; p < block->param + block->num_params; p++)
            if (group > 0 && (c->model.lora.rank == 0 || p->is_adapter) &&
                cuts_group(p, (size_t)group))
                return xasprintf(
                    "the optimizer's state %s has a scale for each %d elements, and a rank's part "
                    "of "
                    "%s (%d x %d) would cut such a group; use fewer tensor ranks, or states "
                    "without groups",
                    o->state[k].name, group, p->name, p->rows, p->cols);
    }
    return NULL;
}

/* An NF4 block has one absmax. Scales of absmax (double quantization) are decoded, so two ranks may
 * share a group of these scales. */
static char *refused_nf4(const Config *c, const UnitLayout *block)
{
    for (const Param *p = block->param;
         p < block->param + block->num_params && c->model.lora.base == BASE_NF4; p++)
        if (p->is_operand && cuts_group(p, NF4_BLOCK))
            return xasprintf(
                "nf4 of lora.base has a scale for each %d elements, and a rank's part of "
                "%s (%d x %d) would cut such a group; "
                "use fewer tensor ranks, or --lora.base=e4m3",
                NF4_BLOCK, p->name, p->rows, p->cols);
    return NULL;
}

char *check_tensor_ranks_refusal(const Config *c, int world)
{
    const int n = tensor_ranks(&c->strategy);
    char *refusal = n > 1 ? refused_combination(c) : NULL;
    if (n > 1 && !refusal)
        refusal = refused_parts(c, n, world);
    for (int l = 0; n > 1 && l < c->model.n_layers && !refusal; l++) {
        UnitLayout block;
        unit_shape(&block, &c->model, unit_of_layer(&c->model, l), 1);
        unit_cut(&block, n, 0, 1);
        refusal = refused_groups(c, &block);
        refusal = refusal ? refusal : refused_nf4(c, &block);
        free(block.param);
    }
    return refusal;
}

void check_tensor_ranks(Reader *r)
{
    const char *refusal = check_tensor_ranks_refusal(&r->s->c, r->world);
    if (refusal)
        die("%s: parallelism.tensor %d: %s", reader_where(r, "parallelism.tensor"),
            tensor_ranks(&r->s->c.strategy), refusal);
}
