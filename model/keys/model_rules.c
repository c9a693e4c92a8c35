/* Rules that the keys model.* and a config.json share, beyond single values. */
#include "model/keys/model_rules.h"

#include <string.h>

#include "kernels/runtime/error.h"

void model_rules_heads(ModelConfig *m, const HeadKeys *keys)
{
    const char *width = keys->width, *heads = keys->heads.name, *dim = keys->head_dim.name;
    if (m->n_kv_heads == 0)
        m->n_kv_heads = m->n_heads;
    if (m->n_heads % m->n_kv_heads != 0)
        die("%s: %s %d is not a multiple of %s %d; a divisor of %s is needed", keys->kv_heads.where,
            heads, m->n_heads, keys->kv_heads.name, m->n_kv_heads, heads);
    if (m->head_dim == 0 && m->d_model % m->n_heads != 0)
        die("%s: %s %d is not a multiple of %s %d; use %s %d or %ld, or give %s", keys->heads.where,
            width, m->d_model, heads, m->n_heads, width, m->d_model / m->n_heads * m->n_heads,
            (m->d_model / m->n_heads + 1L) * m->n_heads, dim);
    if (m->head_dim == 0)
        m->head_dim = m->d_model / m->n_heads;
    if (m->head_dim % 2 != 0)
        die("%s: %s %d: the width of a head must be even, because rotary positions rotate pairs",
            keys->head_dim.where, dim, m->head_dim);
}

/* Shortens a list of layer types to the shortest list whose repetition gives the types of all
 * blocks; to the empty list if all blocks have the same type. */
static void shorten(LayerTypes *types, int n_layers)
{
    LayerTypes all = { .count = n_layers };
    int period = 1, marked = 0;
    for (int l = 0; l < n_layers; l++) {
        all.marked[l] = types->marked[l % types->count];
        marked += all.marked[l];
    }
    for (int l = period; l < n_layers; l++)
        if (all.marked[l] != all.marked[l % period]) {
            period++;
            l = period - 1;
        }
    *types = (LayerTypes){ 0 };
    if (marked == 0 || marked == n_layers)
        return;
    types->count = period;
    memcpy(types->marked, all.marked, (size_t)period * sizeof all.marked[0]);
}

void model_rules_experts(ModelConfig *m, const char *where)
{
    Experts *e = &m->experts;
    int sparse = 0;
    for (int l = 0; l < m->n_layers; l++)
        sparse += layer_experts(m, l) > 0;
    if (e->count == 0)
        e->dense = (LayerTypes){ 0 };
    else if (sparse == 0)
        die("%s: all %d blocks are dense, but model.num_experts is %d; leave out the experts, or "
            "give one block experts",
            where, m->n_layers, e->count);
    else if (sparse < m->n_layers && e->dense_width == 0)
        die("%s: %d blocks are dense, and their width is not given; give "
            "model.dense_intermediate_size",
            where, m->n_layers - sparse);
    if (e->dense.count > 0)
        shorten(&e->dense, m->n_layers);
    if (e->dense.count == 0)
        e->dense_width = 0;
}

void model_rules_rope(const ModelConfig *m, const char *where)
{
    if (m->rope_scaling.type == ROPE_LLAMA3 &&
        m->rope_scaling.high_freq_factor <= m->rope_scaling.low_freq_factor)
        die("%s: rope_scaling.high_freq_factor %g must be above low_freq_factor %g", where,
            m->rope_scaling.high_freq_factor, m->rope_scaling.low_freq_factor);
    if (m->rope_scaling.type == ROPE_YARN && m->rope_scaling.beta_fast <= m->rope_scaling.beta_slow)
        die("%s: rope_scaling.beta_fast %g must be above beta_slow %g", where,
            m->rope_scaling.beta_fast, m->rope_scaling.beta_slow);
    if (m->rope_scaling.type == ROPE_YARN && m->rope_theta <= 1)
        die("%s: rope_theta %g: YaRN needs a rope_theta above 1, as all frequencies are equal at 1",
            where, m->rope_theta);
}

void model_rules_windows(ModelConfig *m, const char *where)
{
    bool any = m->layer_types.count == 0;
    for (int l = 0; l < m->n_layers && !any; l++)
        any = m->layer_types.marked[l % m->layer_types.count];
    if (any && m->layer_types.count > 0 && m->sliding_window == 0)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give "
            "sliding_window, or only full_attention",
            where);
    if (!any)
        m->sliding_window = 0;
    if (m->layer_types.count > 0)
        shorten(&m->layer_types, m->n_layers);
    if (m->rope_scaling.type == ROPE_DEFAULT || m->sliding_window == 0)
        m->rope_scaling.full_attn_layers_only = false;
    if (m->no_rope_interval > m->n_layers)
        m->no_rope_interval = 0;
}
