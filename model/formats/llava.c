/* text_config in the published folder of LLaVA-1.5 has few keys; all others have the defaults of
 * the text model's class. */
#include "model/formats/llava.h"

#include <string.h>

#include "kernels/runtime/error.h"
#include "model/keys/value_json.h"

static const json_t *get(const json_t *from, const char *key)
{
    const json_t *value = json_object_get(from, key);
    return json_is_null(value) ? NULL : value;
}

static const char *text_of(const json_t *from, const char *key, const char *otherwise)
{
    const char *text = json_string_value(get(from, key));
    return text ? text : otherwise;
}

/* Reads a whole number >= `least`. */
static int number(const json_t *from, const char *key, int least, int otherwise, const char *path)
{
    const json_t *value = get(from, key);
    if (!value)
        return otherwise;
    if (!json_is_integer(value) || json_integer_value(value) < least ||
        json_integer_value(value) > 1 << 24)
        value_json_wrong(path, key, least ? "a positive number" : "a number", value);
    return (int)json_integer_value(value);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Defaults of keys that the config.json of a text model must give [transformers 4.57, LlamaConfig,
 * MistralConfig, Qwen3Config]. */
static const struct {
    const char *type;
    int hidden, mlp, layers, heads, vocab;
} text_defaults[] = {
    { "llama", 4096, 11008, 32, 32, 32000 },
    { "mistral", 4096, 14336, 32, 32, 32000 },
    { "qwen3", 4096, 22016, 32, 32, 151936 },
};

static void set_missing(json_t *o, const char *key, json_t *value)
{
    if (!get(o, key))
        json_object_set(o, key, value);
    json_decref(value);
}

static json_t *complete_text(const json_t *config, const char *path)
{
    static const char *const tokens[] = { "bos_token_id", "eos_token_id", "pad_token_id" };
    json_t *given = json_object_get(config, "text_config"),
           *text = json_is_object(given) ? json_deep_copy(given) : json_object();
    const char *type = text_of(text, "model_type", "llama");
    size_t i = 0, count = sizeof text_defaults / sizeof text_defaults[0];
    while (i < count && strcmp(type, text_defaults[i].type) != 0)
        i++;
    if (i == count)
        die("%s: text_config is of model_type %s; in a " LLAVA_CLASS
            " only llama, mistral and qwen3 are supported",
            path, type);
    set_missing(text, "model_type", json_string(text_defaults[i].type));
    set_missing(text, "hidden_size", json_integer(text_defaults[i].hidden));
    set_missing(text, "intermediate_size", json_integer(text_defaults[i].mlp));
    set_missing(text, "num_hidden_layers", json_integer(text_defaults[i].layers));
    set_missing(text, "num_attention_heads", json_integer(text_defaults[i].heads));
    set_missing(text, "vocab_size", json_integer(text_defaults[i].vocab));
    json_object_del(text, "architectures"); /* architectures may name the class without a head */
    for (size_t k = 0; k < 3; k++)
        if (get(config, tokens[k]))
            set_missing(text, tokens[k], json_incref(json_object_get(config, tokens[k])));
    return text;
}

/* Computes the rows of an image: one for each patch of the tower, and one for CLIP's class token
 * unless the strategy drops the first row. */
static void read_tower(ImageConfig *i, const json_t *config, const json_t *tower, const char *path)
{
    const char *type = text_of(tower, "model_type", "clip_vision_model");
    const char *strategy = text_of(config, "vision_feature_select_strategy", "default");
    const bool clip = strcmp(type, "clip_vision_model") == 0,
               drops = strcmp(strategy, "default") == 0;
    if (!clip && strcmp(type, "siglip_vision_model") != 0)
        die("%s: vision_config is of model_type %s; only clip_vision_model and siglip_vision_model "
            "are supported",
            path, type);
    if (!drops && strcmp(strategy, "full") != 0)
        die("%s: vision_feature_select_strategy is %s; expected default or full", path, strategy);
    if (json_is_array(get(config, "vision_feature_layer")))
        die("%s: vision_feature_layer is a list; features of several layers are not supported",
            path);
    const int side = number(tower, "image_size", 1, 224, path) /
                     number(tower, "patch_size", 1, clip ? 32 : 16, path);
    i->feature_size = number(tower, "hidden_size", 1, 768, path);
    i->rows = side * side + clip - drops;
}

static void read_projector(ImageConfig *i, const json_t *config, const char *path)
{
    const char *act = text_of(config, "projector_hidden_act", "gelu"),
               *kind = text_of(config, "projector", "mlp");
    const json_t *bias = get(config, "multimodal_projector_bias");
    if (strcmp(act, "gelu") != 0)
        die("%s: projector_hidden_act is %s; only gelu is supported", path, act);
    if (strcmp(kind, "mlp") != 0 && strcmp(kind, "linear") != 0)
        die("%s: projector is %s; expected mlp or linear", path, kind);
    if (bias && !json_is_boolean(bias))
        value_json_wrong(path, "multimodal_projector_bias", "true or false", bias);
    i->projector = strcmp(kind, "mlp") == 0 ? PROJECTOR_MLP : PROJECTOR_LINEAR;
    i->bias = !bias || json_is_true(bias);
}

json_t *llava_text(ModelConfig *m, const json_t *config, const char *path)
{
    m->image = (ImageConfig){ .token_id = -1, .bias = true };
    if (strcmp(text_of(config, "model_type", ""), LLAVA_TYPE) != 0)
        return NULL;
    const json_t *tower = get(config, "vision_config");
    json_t *text = complete_text(config, path);
    ImageConfig *i = &m->image;
    i->token_id = number(config, "image_token_index", 0,
                         number(config, "image_token_id", 0, 32000, path), path);
    if (tower)
        read_tower(i, config, tower, path);
    else { /* without vision_config, config.json gives the sizes of the features */
        i->feature_size = number(config, "image_feature_size", 1, 0, path);
        i->rows = number(config, "image_seq_length", 1, 0, path);
    }
    if (i->feature_size == 0 || i->rows == 0)
        die("%s: there is neither a vision_config nor image_feature_size and image_seq_length",
            path);
    read_projector(i, config, path);
    return text;
}

/* ---- writing --------------------------------------------------------------------------------- */

json_t *llava_config(const ModelConfig *c, json_t *text)
{
    const ImageConfig *i = &c->image;
    json_t *o = json_pack(
        "{s:[s], s:s, s:O, s:O, s:i, s:i, s:i, s:s, s:b}", "architectures", LLAVA_CLASS,
        "model_type", LLAVA_TYPE, "torch_dtype", json_object_get(text, "torch_dtype"),
        "tie_word_embeddings", json_object_get(text, "tie_word_embeddings"), "image_token_index",
        i->token_id, "image_seq_length", i->rows, "image_feature_size", i->feature_size,
        "projector_hidden_act", "gelu", "multimodal_projector_bias", i->bias);
    CHECK(o, "config.json cannot be described");
    if (i->projector == PROJECTOR_LINEAR)
        json_object_set_new(o, "projector", json_string("linear"));
    json_object_set_new(o, "text_config", text);
    return o;
}
