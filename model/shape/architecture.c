/* The rows, and functions that read them.
 *
 * Projections with the same input are one matrix here, but separate tensors in Hugging Face's
 * files. Matrices are row-major, so each of these tensors is a range of rows of our matrix: q, k, v
 * in qkv; gate, up in gate_up. Our embedding is padded to `embedding_size` rows, and the file's
 * embedding has `vocab_size` rows: the padding rows come last and are not saved.
 *
 * NOTE: post_attention_layernorm is the norm before the MLP in Llama, but the norm of attention's
 * output in OLMo-2. */
#include "model/shape/architecture.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/shape/units.h"

/* ---- the rows -------------------------------------------------------------------------------- */

// clang-format off
#define ATTENTION                                                                                              \
    { "qkv",     { "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight" } },        \
    { "qkv_bias", { "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias" } },             \
    { "qnorm",   { "self_attn.q_norm.weight" } },                                                              \
    { "knorm",   { "self_attn.k_norm.weight" } },                                                              \
    { "out",     { "self_attn.o_proj.weight" } },                                                              \
    { "embed",   { "model.embed_tokens.weight" } },                                                            \
    { "norm",    { "model.norm.weight" } },                                                                    \
    { "head",    { "lm_head.weight" } }
#define MLP                                                                                                    \
    { "gate_up", { "mlp.gate_proj.weight", "mlp.up_proj.weight" } },                                           \
    { "down",    { "mlp.down_proj.weight" } }
// clang-format on

// clang-format off
static const TensorNames norms_before[] = {
    { "attn_norm",   { "input_layernorm.weight" } },
    { "mlp_norm",   { "post_attention_layernorm.weight" } },
    ATTENTION, MLP, { NULL }
};
// clang-format on

// clang-format off
static const TensorNames norms_behind[] = {
    { "attn_norm",   { "post_attention_layernorm.weight" } },
    { "mlp_norm",   { "post_feedforward_layernorm.weight" } },
    ATTENTION, MLP, { NULL }
};
// clang-format on

/* DIFFERS: transformers 5 also writes one tensor for all experts, of gate and up or of down. */
// clang-format off
static const TensorNames experts[] = {
    { "attn_norm",  { "input_layernorm.weight" } },
    { "mlp_norm",   { "post_attention_layernorm.weight" } },
    { "router",     { "mlp.gate.weight" } },
    { "gate_up",    { "mlp.experts.%d.gate_proj.weight", "mlp.experts.%d.up_proj.weight" } },
    { "down",       { "mlp.experts.%d.down_proj.weight" } },
    ATTENTION, MLP, { NULL }
};
// clang-format on

/* The class of all models with images (projector.h). Any text model is possible [transformers,
 * LlavaForConditionalGeneration]. */
// clang-format off
static const TensorNames of_projector[] = {
    { "image_in",       { "multi_modal_projector.linear_1.weight" } },
    { "image_in_bias",  { "multi_modal_projector.linear_1.bias" } },
    { "image_out",      { "multi_modal_projector.linear_2.weight" } },
    { "image_out_bias", { "multi_modal_projector.linear_2.bias" } },
    { NULL }
};
// clang-format on

enum { ANY_ROPE = 1 << ROPE_DEFAULT | 1 << ROPE_LLAMA3 | 1 << ROPE_YARN };

// clang-format off
#define KEYS(...) (const ClassKey[]){ __VA_ARGS__, { NULL } }
// clang-format on

/* In the order of search. If two classes can compute a model, such as Llama and Mistral without a
 * window, the first is chosen unless the configuration names the other. */
static const Architecture built_in[] = {
    /* heads_divide: transformers 5 checks this only for this class */
    { "LlamaForCausalLM", "llama", "Llama", .norm = RMS_NORM, .norm_affine = true, .images = true,
      .tying = true, .heads_divide = true, .rope_types = ANY_ROPE, .blocks = "model.layers",
      .tensors = norms_before,
      .keys = KEYS({ "head_dim", 0 }, { "mlp_bias", 0 }, { "rms_norm_eps", 1e-6 },
                   { "eos_token_id", 2 }) },

    /* this eps is built into OlmoLayerNorm of transformers */
    { "OlmoForCausalLM", "olmo", "OLMo", .norm = LAYER_NORM, .norm_eps = 1e-5f, .clip = true,
      .tying = true, .rope_types = ANY_ROPE, .blocks = "model.layers", .tensors = norms_before,
      .keys = KEYS({ "clip_qkv", 0 }, { "eos_token_id", 50279 }, { "pad_token_id", 1 }) },

    { "Olmo2ForCausalLM", "olmo2", "OLMo-2", .norm = RMS_NORM, .norm_affine = true,
      .norm_after = true, .qk_norm = QK_NORM_WIDTH, .tying = true, .rope_types = ANY_ROPE,
      .blocks = "model.layers", .tensors = norms_behind,
      .keys = KEYS({ "rms_norm_eps", 1e-5 }, { "eos_token_id", 50279 }, { "pad_token_id", 1 }) },

    { "MistralForCausalLM", "mistral", "Mistral", .norm = RMS_NORM, .norm_affine = true,
      .images = true, .tying = true, .windows = SAME_WINDOW, .rope_types = ANY_ROPE,
      .with_layer_types = "MinistralForCausalLM", .blocks = "model.layers", .tensors = norms_before,
      .keys = KEYS({ "head_dim", 0 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 8 },
                   { "max_position_embeddings", 131072 }, { "sliding_window", 4096 },
                   { "eos_token_id", 2 }) },

    { "MinistralForCausalLM", "ministral", "Ministral", .norm = RMS_NORM, .norm_affine = true,
      .tying = true, .windows = WINDOW_BY_LAYER, .rope_types = ANY_ROPE, .blocks = "model.layers",
      .tensors = norms_before,
      .keys = KEYS({ "head_dim", 0 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 8 },
                   { "max_position_embeddings", 131072 }, { "sliding_window", 4096 },
                   { "layer_types", 0 }, { "eos_token_id", 2 }) },

    /* q, k and v always have biases; attention_bias does not matter */
    { "Qwen2ForCausalLM", "qwen2", "Qwen2", .norm = RMS_NORM, .norm_affine = true, .qkv_bias = true,
      .tying = true, .windows = WINDOW_BY_LAYER, .rope_types = ANY_ROPE, .blocks = "model.layers",
      .tensors = norms_before,
      .keys = KEYS({ "attention_bias", 0 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 32 },
                   { "max_position_embeddings", 32768 }, { "use_sliding_window", 0 },
                   { "sliding_window", 4096 }, { "max_window_layers", 28 }, { "layer_types", 0 }) },

    { "Qwen3ForCausalLM", "qwen3", "Qwen3", .norm = RMS_NORM, .norm_affine = true, .images = true,
      .qk_norm = QK_NORM_HEAD, .tying = true, .windows = WINDOW_BY_LAYER, .rope_types = ANY_ROPE,
      .blocks = "model.layers", .tensors = norms_before,
      .keys = KEYS({ "head_dim", 128 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 32 },
                   { "max_position_embeddings", 32768 }, { "use_sliding_window", 0 },
                   { "sliding_window", 4096 }, { "max_window_layers", 28 }, { "layer_types", 0 }) },

    /* without layer_types, every fourth block has full attention */
    { "Olmo3ForCausalLM", "olmo3", "OLMo-3", .norm = RMS_NORM, .norm_affine = true,
      .norm_after = true, .qk_norm = QK_NORM_WIDTH, .tying = true, .windows = WINDOW_BY_LAYER,
      .rope_types = ANY_ROPE, .full_attn_scaled_only = true, .blocks = "model.layers",
      .tensors = norms_behind,
      .keys = KEYS({ "rms_norm_eps", 1e-5 }, { "rope_theta", 500000 }, { "sliding_window", 4096 },
                   { "layer_types", 4 }, { "eos_token_id", 50279 }, { "pad_token_id", 1 }) },

    { "OlmoeForCausalLM", "olmoe", "OLMoE", .norm = RMS_NORM, .norm_affine = true,
      .qk_norm = QK_NORM_WIDTH, .clip = true, .experts = true, .tying = true,
      .rope_types = ANY_ROPE, .blocks = "model.layers", .tensors = experts,
      .keys = KEYS({ "clip_qkv", 0 }, { "rms_norm_eps", 1e-5 }, { "num_experts", 64 },
                   { "num_local_experts", 0 }, { "num_experts_per_tok", 8 },
                   { "norm_topk_prob", 0 }, { "router_aux_loss_coef", 0.01 },
                   { "output_router_logits", 0 }, { "max_position_embeddings", 4096 },
                   { "eos_token_id", 50279 }, { "pad_token_id", 1 }) },

    { "Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3-MoE", .norm = RMS_NORM, .norm_affine = true,
      .qk_norm = QK_NORM_HEAD, .experts = true, .dense_blocks = true, .tying = true,
      .windows = SAME_WINDOW, .rope_types = ANY_ROPE, .blocks = "model.layers", .tensors = experts,
      .keys = KEYS({ "head_dim", 0 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 4 },
                   { "intermediate_size", 6144 }, { "moe_intermediate_size", 768 },
                   { "num_experts", 128 }, { "num_local_experts", 0 }, { "num_experts_per_tok", 8 },
                   { "norm_topk_prob", 0 }, { "router_aux_loss_coef", 0.001 },
                   { "output_router_logits", 0 }, { "decoder_sparse_step", 1 },
                   { "mlp_only_layers", 0 }, { "max_position_embeddings", 32768 },
                   { "use_sliding_window", 0 }, { "sliding_window", 4096 }) },

    { "SmolLM3ForCausalLM", "smollm3", "SmolLM3", .norm = RMS_NORM, .norm_affine = true,
      .tying = true, .no_rope = true, .rope_types = ANY_ROPE, .blocks = "model.layers",
      .tensors = norms_before,
      .keys = KEYS({ "mlp_bias", 0 }, { "rms_norm_eps", 1e-6 }, { "num_key_value_heads", 4 },
                   { "max_position_embeddings", 32768 }, { "rope_theta", 2000000 },
                   { "tie_word_embeddings", 1 }, { "no_rope_layers", 0 },
                   { "no_rope_layer_interval", 4 }, { "eos_token_id", 128001 },
                   { "pad_token_id", 128004 }) },
};

/* ---- finding a row --------------------------------------------------------------------------- */

enum { BUILT_IN = sizeof built_in / sizeof built_in[0], MAX_ADDED = 16 };
static const Architecture *added[MAX_ADDED];
static int num_added;

static int count_all(void)
{
    return BUILT_IN + num_added;
}

static const Architecture *row(int i)
{
    return i < BUILT_IN ? &built_in[i] : added[i - BUILT_IN];
}

const Architecture *architecture_find(const char *class)
{
    for (int i = 0; i < count_all(); i++)
        if (strcmp(row(i)->class, class) == 0)
            return row(i);
    return NULL;
}

const Architecture *architecture_of_type(const char *model_type)
{
    for (int i = 0; i < count_all(); i++)
        if (strcmp(row(i)->model_type, model_type) == 0)
            return row(i);
    return NULL;
}

char *architecture_names(void)
{
    char *text;
    FILE *f = xtext(&text);
    for (int i = 0; i < count_all(); i++)
        fprintf(f, "%s%s", i ? ", " : "", row(i)->class);
    fclose(f);
    return text;
}

void architecture_add(const Architecture *a)
{
    if (architecture_find(a->class))
        die("architecture_add: class %s exists already; use another name", a->class);
    CHECK(num_added < MAX_ADDED, "more than %d architectures", MAX_ADDED);
    added[num_added++] = a;
}

const ClassKey *architecture_key(const Architecture *a, const char *key)
{
    for (const ClassKey *k = a->keys; k && k->key; k++)
        if (strcmp(k->key, key) == 0)
            return k;
    return NULL;
}

/* ---- the row of a model ---------------------------------------------------------------------- */

/* Adds a setting that must change to the list, unless `holds`. */
static void need(FILE *f, bool holds, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void need(FILE *f, bool holds, const char *format, ...)
{
    va_list args;
    if (holds)
        return;
    fputs(ftell(f) > 0 ? ", model." : "model.", f);
    va_start(args, format);
    vfprintf(f, format, args);
    va_end(args);
}

/* Whether `a` supports the windows of c's blocks. */
static bool windows_fit(const Architecture *a, const ModelConfig *c)
{
    int sliding = 0;
    for (int l = 0; l < c->n_layers; l++)
        sliding += layer_slides(c, l);
    return sliding == 0 || a->windows == WINDOW_BY_LAYER ||
           (a->windows == SAME_WINDOW && sliding == c->n_layers);
}

/* Whether `a` and c scale the rotary frequencies of the same blocks. */
static bool scaling_fits(const Architecture *a, const ModelConfig *c)
{
    for (int l = 0; l < c->n_layers && c->rope_scaling.type != ROPE_DEFAULT; l++)
        if (layer_is_scaled(c, l) == (a->full_attn_scaled_only && layer_slides(c, l)))
            return false;
    return true;
}

char *architecture_differences(const Architecture *a, const ModelConfig *c)
{
    static const char *const qk_norms[] = { "false", "true", "head" };
    char *text;
    FILE *f = xtext(&text);
    need(f, c->norm.kind == a->norm, "layer_norm_type: %s",
         a->norm == RMS_NORM ? "rms" : "default");
    need(f, c->norm_affine == a->norm_affine, "layer_norm_with_affine: %s",
         a->norm_affine ? "true" : "false");
    need(f, a->norm_eps == 0 || c->norm.eps == a->norm_eps, "layer_norm_eps: %g",
         (double)a->norm_eps);
    need(f, c->norm_after == a->norm_after, "norm_after: %s", a->norm_after ? "true" : "false");
    need(f, c->qkv_bias == a->qkv_bias, "qkv_bias: %s", a->qkv_bias ? "true" : "false");
    need(f, c->qk_norm == a->qk_norm, "attention_layer_norm: %s", qk_norms[a->qk_norm]);
    need(f, a->clip || c->clip_qkv == 0, "clip_qkv: null");
    need(f, a->experts || c->experts.count == 0, "num_experts: null");
    need(f, !a->experts || c->experts.count > 0, "num_experts: 2 or more");
    need(f, a->dense_blocks || c->experts.dense.count == 0, "mlp_layer_types: null");
    need(f, a->tying || !c->weight_tying, "weight_tying: false");
    need(f, !a->heads_divide || c->d_model % c->n_heads == 0, "n_heads: a divisor of d_model %d",
         c->d_model);
    need(f, a->no_rope || c->no_rope_interval == 0, "no_rope_layer_interval: null");
    if (a->windows == NO_WINDOW)
        need(f, windows_fit(a, c), "sliding_window: null");
    else
        need(f, windows_fit(a, c), "layer_types: null");
    if (a->rope_types >> c->rope_scaling.type & 1)
        need(f, scaling_fits(a, c), "rope_scaling.full_attn_layers_only: %s",
             a->full_attn_scaled_only ? "true" : "false");
    else
        need(f, false, "rope_scaling: null");
    fclose(f);
    return text;
}

static bool computes(const Architecture *a, const ModelConfig *c)
{
    char *differences = architecture_differences(a, c);
    const bool same = !*differences;
    free(differences);
    return same;
}

/* where: prefix of the message, such as "x.yaml: ". */
static _Noreturn void die_of_none(const ModelConfig *c, const char *where)
{
    char *text;
    FILE *f = xtext(&text);
    for (int i = 0; i < count_all(); i++) {
        char *differences = architecture_differences(row(i), c);
        fprintf(f, "\n  %s (%s): %s", row(i)->family, row(i)->class, differences);
        free(differences);
    }
    fclose(f);
    die("%sno Hugging Face architecture can compute this model, so it cannot be saved. Each class "
        "would need other settings of the model:%s",
        where, text);
}

static const Architecture *find_computing(const ModelConfig *c)
{
    if (c->architecture && computes(c->architecture, c))
        return c->architecture;
    for (int i = 0; i < count_all(); i++)
        if (computes(row(i), c))
            return row(i);
    return NULL;
}

const Architecture *architecture_of(const ModelConfig *c)
{
    const Architecture *a = find_computing(c);
    if (!a)
        die_of_none(c, "");
    return a;
}

const Architecture *architecture_choose(const ModelConfig *c, const char *file)
{
    const Architecture *a = find_computing(c);
    if (!a)
        die_of_none(c, xasprintf("%s: ", file));
    return a;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* The row of a parameter. A parameter with several items has a row of its own, whose names have a
 * %d. */
static const TensorNames *names_of(const Architecture *a, const char *param, int items)
{
    const TensorNames *const lists[] = { a->tensors, of_projector };
    for (int i = 0; i < 2; i++)
        for (const TensorNames *t = lists[i]; t->param; t++)
            if (strcmp(t->param, param) == 0 &&
                (strstr(t->projection[0], "%d") != NULL) == (items > 1))
                return t;
    die("%s: no Hugging Face name for parameter %s of %d items; add a row to its tensors", a->class,
        param, items);
}

/* The row of the parameter to which the adapter p belongs: qkv for qkv_a. */
static const TensorNames *names_of_linear(const Architecture *a, const UnitLayout *s,
                                          const Param *p)
{
    const Param *matrix = s->param;
    while (!matrix->is_operand || matrix->linear != p->linear)
        matrix++;
    return names_of(a, matrix->name, matrix->items);
}

const char *hf_prefix(const ModelConfig *c)
{
    return c->image.feature_size > 0 ? "language_model." : "";
}

void hf_tree_name(char to[HF_NAME], const char *name)
{
    static const struct {
        const char *file, *tree;
    } levels[] = {
        { "language_model.model.", "model.language_model." },
        { "multi_modal_projector.", "model.multi_modal_projector." },
    };
    const char *first = "";
    for (int i = 0; i < 2 && !*first; i++)
        if (strncmp(name, levels[i].file, strlen(levels[i].file)) == 0) {
            first = levels[i].tree;
            name += strlen(levels[i].file);
        }
    snprintf(to, HF_NAME, "%s%s", first, name);
}

void hf_adapter_name(char to[HF_NAME], const char *name, const char *matrix)
{
    char tree[HF_NAME];
    hf_tree_name(tree, name);
    const int length = (int)(strlen(tree) - (matrix ? strlen(".weight") : 0));
    const int n = snprintf(to, HF_NAME, "base_model.model.%.*s%s%s%s", length, tree,
                           matrix ? "." : "", matrix ? matrix : "", matrix ? ".weight" : "");
    CHECK(n < HF_NAME, "the name of the adapter of %s is too long", name);
}

static void set_name(HfTensor *t, const Architecture *a, const UnitLayout *s, const Param *p,
                     const char *name)
{
    const char *prefix = s->kind->is_projector ? "" : hf_prefix(s->config),
               *number = strstr(name, "%d");
    char file[HF_NAME], item[HF_NAME];
    if (number)
        snprintf(item, sizeof item, "%.*s%d%s", (int)(number - name), name, p->item, number + 2);
    else
        snprintf(item, sizeof item, "%s", name);
    int length = s->kind->is_layer
                     ? snprintf(file, sizeof file, "%s%s.%d.%s", prefix, a->blocks, s->number, item)
                     : snprintf(file, sizeof file, "%s%s", prefix, item);
    CHECK(length < HF_NAME, "the name %s is too long", item);
    if (p->is_adapter)
        hf_adapter_name(t->name, file, p->is_b ? "lora_B" : "lora_A");
    else
        strcpy(t->name, file);
}

/* Adds the tensors of a unit to the list. */
static HfTensor *add_tensors(HfTensor *list, int *count, const ModelConfig *c,
                             const UnitLayout *shape, int unit)
{
    const Architecture *a = architecture_of(c);
    list =
        xrealloc(list, (size_t)(*count + shape->num_params * MAX_PROJECTIONS + 1) * sizeof *list);
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        const TensorNames *names =
            p->is_adapter ? names_of_linear(a, shape, p) : names_of(a, p->name, p->items);
        const bool whole = !names->projection[1];
        for (int k = 0; k < (whole ? 1 : p->num_projections); k++) {
            const Projection *projection = &p->projection[k];
            const char *name = names->projection[projection->tensor];
            CHECK(name, "%s: no Hugging Face name for a part of parameter %s", a->class, p->name);
            HfTensor *t = &list[(*count)++];
            *t = (HfTensor){
                .unit = unit,
                .param = i,
                .first = (size_t)projection->first * (size_t)p->cols,
                .rows = (size_t)(whole && p->num_projections > 1 ? p->rows : projection->rows),
                .cols = (size_t)p->cols,
                .adapter = p->is_adapter,
                .vector = p->is_vector,
                .operand = p->is_operand,
                .joined = k > 0 || p->item > 0,
                .with_adapter = shape->kind->is_projector && lora_trains_projector(c)
            };
            if (p->is_vector)
                t->cols *= t->rows, t->rows = 1;
            t->max_rows = p->has_padding ? (size_t)p->rows : t->rows;
            set_name(t, a, shape, p, name);
        }
    }
    return list;
}

HfTensor *hf_tensors(const ModelConfig *c, const UnitLayout *shape, int unit, int *count)
{
    *count = 0;
    return add_tensors(NULL, count, c, shape, unit);
}

HfTensor *hf_tensors_of(const ModelConfig *c, int *count)
{
    const int units = unit_count(c);
    HfTensor *list = NULL;
    *count = 0;
    for (int unit = 0; unit < units; unit++) {
        UnitLayout shape;
        unit_shape(&shape, c, unit, 1);
        list = add_tensors(list, count, c, &shape, unit);
        free(shape.param);
    }
    return list;
}
