/* Hugging Face names and config.json.
 *
 * Our projections that read the same input are one matrix; Hugging Face keeps them apart. As matrices are row-
 * major, each of its tensors is a run of rows of ours: q, k, v in qkv; gate, up in gate_up. The embedding is padded
 * here to `embedding_size` rows and has `vocab_size` rows there; the padding follows the rest, so it is simply left
 * out.
 *
 * NOTE: post_attention_layernorm is the norm in front of the MLP in Llama, but that of the attention's output in
 * OLMo-2. */
#include "model/architecture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/error.h"

const char *hf_class(const ModelConfig *c)
{
    bool rms = c->norm.kind == RMS_NORM;
    if (rms && c->norm_affine && !c->norm_after && !c->qk_norm && c->clip_qkv == 0)
        return "LlamaForCausalLM";
    /* transformers' OlmoLayerNorm has this eps built in */
    if (!rms && !c->norm_affine && !c->norm_after && !c->qk_norm && c->norm.eps == 1e-5f)
        return "OlmoForCausalLM";
    if (rms && c->norm_affine && c->norm_after && c->qk_norm && c->clip_qkv == 0)
        return "Olmo2ForCausalLM";
    die("no architecture of Hugging Face computes this model, so it cannot be saved: %s with%s weights, eps %g, "
        "norms %s the branches, %s norm of q and k, clip_qkv %g.\nExpected Llama (RMS norms with weights before the "
        "branches: model.layer_norm_type: rms, layer_norm_with_affine: true), OLMo (LayerNorms without weights before them, "
        "eps 1e-5, clip_qkv or not: layer_norm_type: default, layer_norm_with_affine: false) or OLMo-2 (RMS norms with weights "
        "behind the branches and of q and k: layer_norm_type: rms, norm_after: true, attention_layer_norm: true)",
        rms ? "RMS norms" : "LayerNorms", c->norm_affine ? "" : "out",
        (double)c->norm.eps, c->norm_after ? "behind" : "before", c->qk_norm ? "a" : "no", (double)c->clip_qkv);
}

/* ---- names ------------------------------------------------------------------------------------------------ */

/* The parts of each field of a Unit: their names, behind "model.layers.<l>." in blocks, and their rows. */
typedef struct { const char *name; size_t rows; } Part;

static int parts_of(Part part[3], const ModelConfig *c, const Param *p)
{
    size_t HD = (size_t)c->n_heads * c->head_dim, KD = (size_t)c->n_kv_heads * c->head_dim, F = (size_t)c->mlp_width;
    size_t rows = (size_t)p->rows, V = (size_t)c->vocab_size;
    bool after = c->norm_after;
    const struct { const char *field; Part part[3]; } table[] = {
        { "norm0",   { { after ? "post_attention_layernorm.weight" : "input_layernorm.weight", 1 } } },
        { "qkv",     { { "self_attn.q_proj.weight", HD }, { "self_attn.k_proj.weight", KD },
                       { "self_attn.v_proj.weight", KD } } },
        { "qnorm",   { { "self_attn.q_norm.weight", 1 } } },
        { "knorm",   { { "self_attn.k_norm.weight", 1 } } },
        { "out",     { { "self_attn.o_proj.weight", rows } } },
        { "norm1",   { { after ? "post_feedforward_layernorm.weight" : "post_attention_layernorm.weight", 1 } } },
        { "gate_up", { { "mlp.gate_proj.weight", F }, { "mlp.up_proj.weight", F } } },
        { "down",    { { "mlp.down_proj.weight", rows } } },
        { "embed",   { { "model.embed_tokens.weight", V } } },
        { "norm",    { { "model.norm.weight", 1 } } },
        { "head",    { { "lm_head.weight", V } } },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].field, p->name) != 0)
            continue;
        memcpy(part, table[i].part, sizeof table[i].part);
        return part[2].name ? 3 : part[1].name ? 2 : 1;
    }
    die_check(__FILE__, __LINE__, "parts_of", "no Hugging Face name for %s", p->name);
}

int hf_tensors(HfTensor out[HF_TENSORS], const ModelConfig *c, const UnitShape *shape, int unit)
{
    int count = 0;
    bool block = unit > 0 && unit <= c->n_layers;
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        Part part[3];
        int parts = parts_of(part, c, p);
        size_t first = p->offset;
        for (int k = 0; k < parts; k++) {
            CHECK(count < HF_TENSORS, "unit %d has more tensors", unit);
            HfTensor *t = &out[count++];
            *t = (HfTensor){ .region = p->region, .first = first, .rows = part[k].rows, .cols = (size_t)p->cols, .vector = p->is_norm,
                             .max_rows = parts == 1 ? (size_t)p->rows : part[k].rows };
            if (block)
                snprintf(t->name, sizeof t->name, "model.layers.%d.%s", unit - 1, part[k].name);
            else
                snprintf(t->name, sizeof t->name, "%s", part[k].name);
            first += t->rows * t->cols;
        }
    }
    return count;
}

/* ---- config.json ------------------------------------------------------------------------------------------ */

/* The decimal number somebody wrote, not the float next to it: 1e-05, not 9.99999974e-06. */
static json_t *decimal(float x)
{
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)x);
    return json_real(strtod(text, NULL));
}

static json_t *token_id(int id)
{
    return id < 0 ? json_null() : json_integer(id);
}

static json_t *rope_scaling(const ModelConfig *c)
{
    if (c->rope_scaling.factor <= 0)
        return json_null();
    return json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3", "factor", c->rope_scaling.factor,
                     "low_freq_factor", c->rope_scaling.low_freq_factor,
                     "high_freq_factor", c->rope_scaling.high_freq_factor,
                     "original_max_position_embeddings", c->rope_scaling.original_length);
}

json_t *hf_config(const ModelConfig *c, DType master)
{
    const char *class = hf_class(c);
    bool llama = strcmp(class, "LlamaForCausalLM") == 0, olmo = strcmp(class, "OlmoForCausalLM") == 0;

    json_t *j = json_pack("{s:[s], s:s, s:s, s:s, s:b, s:f, s:f, s:b}",
                          "architectures", class, "model_type", llama ? "llama" : olmo ? "olmo" : "olmo2",
                          "torch_dtype", master == F32 ? "float32" : "bfloat16", "hidden_act", "silu",
                          "attention_bias", 0, "attention_dropout", 0.0, "initializer_range", c->init_std,
                          "use_cache", 1);
    json_t *sizes = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
                              "hidden_size", c->d_model, "intermediate_size", c->mlp_width,
                              "num_hidden_layers", c->n_layers, "num_attention_heads", c->n_heads,
                              "num_key_value_heads", c->n_kv_heads, "max_position_embeddings", c->max_sequence_length,
                              "vocab_size", c->vocab_size);
    json_t *rest = json_pack("{s:f, s:o, s:b, s:n, s:o, s:o}",
                             "rope_theta", c->rope_theta, "rope_scaling", rope_scaling(c),
                             "tie_word_embeddings", c->weight_tying, "bos_token_id",
                             "eos_token_id", token_id(c->eos_token_id), "pad_token_id", token_id(c->pad_token_id));
    CHECK(j && sizes && rest, "config.json cannot be described");
    json_object_update(j, sizes);
    json_object_update(j, rest);
    json_decref(sizes);
    json_decref(rest);
    /* OLMo's classes know no head_dim of their own, but take one that is given */
    if (llama || c->head_dim * c->n_heads != c->d_model)
        json_object_set_new(j, "head_dim", json_integer(c->head_dim));
    if (llama)
        json_object_set_new(j, "mlp_bias", json_false());
    if (olmo)
        json_object_set_new(j, "clip_qkv", c->clip_qkv > 0 ? decimal(c->clip_qkv) : json_null());
    else
        json_object_set_new(j, "rms_norm_eps", decimal(c->norm.eps));
    return j;
}
