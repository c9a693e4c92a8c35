/* The architecture that a Hugging Face folder describes. transformers leaves out keys that have their class's
 * default, so the defaults here are those of LlamaConfig, OlmoConfig and Olmo2Config. Rotary parameters are
 * `rope_theta` and `rope_scaling` up to transformers 4 and `rope_parameters` since 5. */
#include "model/config/hf.h"

#include "kernels/error.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

typedef struct { json_t *json; char path[4096]; } Source;

static json_t *get(const Source *s, const char *key)
{
    json_t *value = json_object_get(s->json, key);
    return json_is_null(value) ? NULL : value;
}

static double number_of(const Source *s, json_t *from, const char *key, double otherwise)
{
    json_t *value = json_object_get(from, key);
    if (value && !json_is_null(value) && !json_is_number(value))
        die("%s: %s: expected a number", s->path, key);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static int size_of(const Source *s, const char *key, int otherwise)
{
    double x = number_of(s, s->json, key, otherwise);
    if (x < 1 || x > 2147483520 || x != (int)x)              /* what can be rounded up to a multiple of 128 */
        die("%s: %s: expected a whole number from 1 to 2147483520", s->path, key);
    return (int)x;
}

/* A token id; a list of them stands for its first. The classes' defaults may lie beyond a small vocabulary: none. */
static int token_of(const Source *s, const char *key, int vocab_size)
{
    json_t *value = get(s, key);
    if (json_is_array(value))
        value = json_array_get(value, 0);
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    return id >= 0 && id < vocab_size ? (int)id : -1;
}

static void read_rope(ModelConfig *m, const Source *s)
{
    json_t *rope = get(s, "rope_parameters");
    if (!rope)
        rope = get(s, "rope_scaling");
    m->rope_theta = number_of(s, rope, "rope_theta", number_of(s, s->json, "rope_theta", 10000));
    const char *type = json_string_value(json_object_get(rope, "rope_type"));
    if (!type)
        type = json_string_value(json_object_get(rope, "type"));
    m->rope_scaling.factor = 0;
    if (!type || strcmp(type, "default") == 0)
        return;
    if (strcmp(type, "llama3") != 0)
        die("%s: rope_type '%s' is not supported, only default and llama3", s->path, type);
    m->rope_scaling.factor = number_of(s, rope, "factor", 8);
    m->rope_scaling.low_freq_factor = number_of(s, rope, "low_freq_factor", 1);
    m->rope_scaling.high_freq_factor = number_of(s, rope, "high_freq_factor", 4);
    m->rope_scaling.original_length = (int)number_of(s, rope, "original_max_position_embeddings", 8192);
}

/* The parts of the architecture that the class decides. */
static void read_class(ModelConfig *m, const Source *s)
{
    const char *class = json_string_value(json_array_get(get(s, "architectures"), 0));
    const char *type = json_string_value(get(s, "model_type"));
    bool olmo = class && strcmp(class, "OlmoForCausalLM") == 0;
    bool olmo2 = class && strcmp(class, "Olmo2ForCausalLM") == 0;
    if (!olmo && !olmo2 && (!class || strcmp(class, "LlamaForCausalLM") != 0))
        die("%s: architecture %s (model_type %s) is not supported, only LlamaForCausalLM, OlmoForCausalLM and "
            "Olmo2ForCausalLM", s->path, class ? class : "missing", type ? type : "missing");
    m->norm = (Norm){ olmo ? LAYER_NORM : RMS_NORM,
                      olmo ? 1e-5f : (float)number_of(s, s->json, "rms_norm_eps", olmo2 ? 1e-5 : 1e-6) };
    m->norm_affine = !olmo;
    m->norm_after = m->qk_norm = olmo2;
    m->clip_qkv = olmo ? (float)number_of(s, s->json, "clip_qkv", 0) : 0;
    m->weight_tying = json_is_true(get(s, "tie_word_embeddings"));
}

static void refuse(const Source *s, const char *key, bool bad)
{
    if (bad)
        die("%s: its %s is not supported: linear layers have no bias, the MLP is SwiGLU", s->path, key);
}

void config_read_hf(ModelConfig *m, const char *folder)
{
    Source s;
    json_error_t error;
    snprintf(s.path, sizeof s.path, "%s/config.json", folder);
    s.json = json_load_file(s.path, 0, &error);
    if (!s.json && error.line < 1)
        die("%s: cannot be read: %s; load_path must be a folder written by save_pretrained or a checkpoint stepN",
            s.path, error.text);
    if (!s.json)
        die("%s:%d: %s", s.path, error.line, error.text);
    read_class(m, &s);
    const char *activation = json_string_value(get(&s, "hidden_act"));
    refuse(&s, "hidden_act", activation && strcmp(activation, "silu") != 0);
    refuse(&s, "attention_bias", json_is_true(get(&s, "attention_bias")));
    refuse(&s, "mlp_bias", json_is_true(get(&s, "mlp_bias")));
    m->d_model = size_of(&s, "hidden_size", 0);
    m->n_layers = size_of(&s, "num_hidden_layers", 0);
    m->n_heads = size_of(&s, "num_attention_heads", 0);
    m->n_kv_heads = size_of(&s, "num_key_value_heads", m->n_heads);
    m->head_dim = get(&s, "head_dim") ? size_of(&s, "head_dim", 0) : m->d_model / m->n_heads;
    m->mlp_width = size_of(&s, "intermediate_size", 0);
    m->vocab_size = size_of(&s, "vocab_size", 0);
    m->embedding_size = (m->vocab_size + 127) / 128 * 128;
    m->max_sequence_length = size_of(&s, "max_position_embeddings", 2048);
    m->eos_token_id = token_of(&s, "eos_token_id", m->vocab_size);
    m->pad_token_id = token_of(&s, "pad_token_id", m->vocab_size);
    read_rope(m, &s);
    json_decref(s.json);
}
