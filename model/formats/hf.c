/* Reads and writes config.json by the table of hf_keys.c. transformers 4 uses the keys rope_theta
 * and rope_scaling, transformers 5 the key rope_parameters; both versions can read the written
 * files. */
#include "model/formats/hf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/formats/file.h"
#include "model/formats/hf_keys.h"
#include "model/formats/llava.h"
#include "model/formats/quantized.h"
#include "model/keys/key.h"
#include "model/keys/model_rules.h"
#include "model/keys/value_json.h"

static const char *const rope_types[NUM_ROPE_TYPES] = { "default", "llama3", "yarn" };

/* The row of config_keys for a key; its offset is relative to the ModelConfig. */
static ConfigKey row_of(const HfKey *k)
{
    ConfigKey row = *key_find(k->what);
    row.offset -= offsetof(Settings, c.model);
    /* our key counts both halves of SwiGLU, config.json counts one half */
    if (strcmp(k->what, "model.mlp_hidden_size") == 0) {
        row.type = INT;
        row.min /= 2;
        row.max /= 2;
        row.offset = offsetof(ModelConfig, mlp_width);
    }
    return row;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    json_t *json, *generation;
    const Architecture *class;
    char path[4096];
} HfConfig;

static json_t *get(const json_t *from, const char *key)
{
    json_t *value = json_object_get(from, key);
    return json_is_null(value) ? NULL : value;
}

static _Noreturn void wrong(const HfConfig *s, const char *key, const char *expected,
                            const json_t *found)
{
    value_json_wrong(s->path, key, expected, found);
}

/* Reads and checks the value of k->key in `from`. null has the same meaning as in our
 * configuration, if it is allowed there. */
static void read_value(ModelConfig *m, const HfConfig *s, const json_t *from, const HfKey *k)
{
    const ConfigKey row = row_of(k);
    const ClassKey *own = architecture_key(s->class, k->key);
    const json_t *value = json_object_get(from, k->key);
    const double otherwise = own ? own->default_value : k->otherwise;
    if (json_is_null(value) && !isnan(row.none))
        value_json_set(m, &row, row.none);
    else if ((!value || json_is_null(value)) && !isnan(otherwise))
        value_json_set(m, &row, otherwise);
    else
        value_json_parse(m, &row, value, s->path, k->key);
}

static void read_token(ModelConfig *m, const HfConfig *s, const HfKey *k)
{
    const ConfigKey row = row_of(k);
    const ClassKey *own = architecture_key(s->class, k->key);
    json_t *value = get(s->json, k->key);
    if (!value)
        value = get(s->generation, k->key);
    if (!value && !json_object_get(s->json, k->key) && own && own->default_value < m->vocab_size) {
        value_json_set(m, &row, own->default_value);
        return;
    }
    if (json_is_array(value))
        value = json_array_get(value, 0);
    if (value && !json_is_integer(value))
        wrong(s, k->key, "a token id, a list of them or null", value);
    const json_int_t id = value ? json_integer_value(value) : -1;
    if (id >= m->vocab_size)
        warn("%s: %s %lld is outside vocab_size %d and is ignored", s->path, k->key, (long long)id,
             m->vocab_size);
    value_json_set(m, &row, id >= 0 && id < m->vocab_size ? (double)id : -1);
}

/* Whether the value is `only`, or an element of the list `only`. */
static bool is_among(const json_t *value, const json_t *only)
{
    bool found = json_is_number(only) && json_is_number(value)
                     ? json_number_value(value) == json_number_value(only)
                     : json_equal(value, only);
    for (size_t i = 0; i < json_array_size(only); i++)
        found |= json_equal(value, json_array_get(only, i));
    return found;
}

static void refuse_others(const HfConfig *s, const json_t *from, const HfKey *k)
{
    json_t *value = get(from, k->key), *only = json_loads(k->what, JSON_DECODE_ANY, NULL);
    bool same =
        !value || is_among(value, only) || (value_json_is_nothing(value) && !json_is_false(value));
    bool all = json_is_array(value);
    for (size_t i = 0; i < json_array_size(value); i++)
        all &= is_among(json_array_get(value, i), only);
    json_decref(only);
    if (!same && !all)
        die("%s: its %s %.64s is not supported, only %s%s%s", s->path, k->key,
            json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15)), k->what,
            k->why ? ": " : "", k->why ? k->why : "");
}

/* The keys of `from` that have no row, separated by ", "; NULL: none. type: -1 for the keys of a
 * class, else a RopeType. */
static char *unknown_keys(const HfConfig *s, json_t *from, int type)
{
    char *text;
    const char *key;
    json_t *value;
    FILE *f = xtext(&text);
    json_object_foreach(from, key, value)
    {
        const HfKey *k = type < 0 ? hf_key(s->class, key) : hf_rope_key(key, (RopeType)type);
        if (!k && *key != '_' && !value_json_is_nothing(value))
            fprintf(f, "%s%.64s", ftell(f) > 0 ? ", " : "", key);
    }
    fclose(f);
    if (*text)
        return text;
    free(text);
    return NULL;
}

static void warn_of_unknown(const HfConfig *s, json_t *from, int type)
{
    char *names = unknown_keys(s, from, type);
    if (names && type < 0)
        warn("%s: a %s does not read %s: ignored, as in transformers", s->path, s->class->class,
             names);
    else if (names)
        warn("%s: rope_type %s does not read %s: ignored, as in transformers", s->path,
             rope_types[type], names);
    free(names);
}

/* ---- rotation -------------------------------------------------------------------------------- */

static RopeType rope_type(const HfConfig *s, const json_t *rope)
{
    const json_t *new = get(rope, "rope_type"), *old = get(rope, "type"), *given = new ? new : old;
    const char *type = json_string_value(given);
    if (old && !json_equal(old, given))
        die("%s: rope_type %.64s and type %.64s of the rotation differ; leave type out", s->path,
            type ? type : "no text", json_is_string(old) ? json_string_value(old) : "no text");
    if (given && !type)
        wrong(s, "rope_type", "default, llama3 or yarn", given);
    for (int i = 0; type && i < NUM_ROPE_TYPES; i++)
        if (strcmp(type, rope_types[i]) == 0)
            return (RopeType)i;
    if (type)
        die("%s: rope_type '%s' is not supported, only default, llama3 and yarn", s->path, type);
    return ROPE_DEFAULT;
}

static double read_theta(const HfConfig *s, const json_t *rope)
{
    static const HfKey key = { "rope_theta", HF_VALUE, "model.rope_theta", 10000 };
    ModelConfig m;
    read_value(&m, s, get(rope, "rope_theta") ? rope : s->json, &key);
    return m.rope_theta;
}

/* Returns the rope_parameters of full attention. The rope_parameters of sliding attention must be
 * equal, but without scaling. Only classes with full_attn_scaled_only support parameters by layer
 * type. */
static json_t *full_attention(const HfConfig *s, json_t *full, const json_t *sliding)
{
    if (!s->class->full_attn_scaled_only)
        die("%s: rope_parameters by layer type are not supported in a %s; give one description for "
            "all layers",
            s->path, s->class->class);
    if (rope_type(s, sliding) != ROPE_DEFAULT ||
        (sliding && read_theta(s, sliding) != read_theta(s, full)))
        die("%s: rope_parameters.sliding_attention must be of rope_type default and have the "
            "rope_theta of full_attention, %g",
            s->path, read_theta(s, full));
    return full;
}

/* In a class with rope_parameters by layer type, rope_scaling applies to full attention. NOTE:
 * transformers 5.0 to 5.12 apply rope_parameters without layer types to all layers; later versions
 * ignore them. */
static json_t *find_rope(const HfConfig *s)
{
    json_t *new = get(s->json, "rope_parameters"), *old = get(s->json, "rope_scaling"),
           *either = value_json_is_nothing(old) ? new : old;
    json_t *full = get(new, "full_attention"), *sliding = get(new, "sliding_attention");
    if (either && !json_is_object(either))
        wrong(s, either == old ? "rope_scaling" : "rope_parameters", "an object", either);
    if (full || sliding) {
        if (full && old)
            json_object_update(full, old);
        return full_attention(s, full, sliding);
    }
    const ClassKey *theta = architecture_key(s->class, "rope_theta");
    if (s->class->full_attn_scaled_only && either == old &&
        read_theta(s, old) != read_theta(s, NULL))
        die("%s: rope_theta is %g in rope_scaling, but %g outside of it; transformers 5 uses "
            "different values for layers of full attention and for layers with a sliding window, "
            "which is not supported: make both values equal",
            s->path, read_theta(s, old), read_theta(s, NULL));
    if (s->class->full_attn_scaled_only && either && either == new &&
        (rope_type(s, new) != ROPE_DEFAULT ||
         (theta && read_theta(s, new) != theta->default_value)))
        die("%s: rope_parameters of a %s must be given by layer type, because versions of "
            "transformers read other forms differently: give {\"full_attention\": {...}, "
            "\"sliding_attention\": {...}}",
            s->path, s->class->class);
    if (s->class->full_attn_scaled_only && theta && read_theta(s, either) != theta->default_value)
        warn("%s: rope_theta %g is used for all layers, as in transformers 4; transformers 5 uses "
             "%g for layers with a sliding window, unless rope_parameters has layer types",
             s->path, read_theta(s, either), theta->default_value);
    return either;
}

static void read_rope(ModelConfig *m, const HfConfig *s)
{
    json_t *rope = find_rope(s);
    const unsigned type = 1u << (m->rope_scaling.type = rope_type(s, rope));
    m->rope_theta = read_theta(s, rope);
    m->rope_scaling.full_attn_layers_only =
        m->rope_scaling.type != ROPE_DEFAULT && s->class->full_attn_scaled_only;
    m->rope_scaling.factor = 0;
    for (const HfRopeKey *row = hf_rope_keys; row->key.key; row++) {
        HfKey k = row->key;
        if (!(row->types & type))
            continue;
        if (k.kind == HF_REFUSED)
            refuse_others(s, rope, &k);
        if (m->rope_scaling.type == ROPE_YARN &&
            strcmp(k.key, "original_max_position_embeddings") == 0)
            k.otherwise = m->max_sequence_length;
        if (k.kind == HF_VALUE)
            read_value(m, s, rope, &k);
    }
    const json_t *length = get(s->json, "original_max_position_embeddings");
    if (m->rope_scaling.type != ROPE_DEFAULT && length &&
        json_number_value(length) != m->rope_scaling.original_length)
        die("%s: original_max_position_embeddings is %g at the top level, but %d in the RoPE "
            "parameters. transformers 4 and transformers 5 read different ones of these two "
            "values: "
            "make the values equal",
            s->path, json_number_value(length), m->rope_scaling.original_length);
    warn_of_unknown(s, rope, m->rope_scaling.type);
}

/* ---- windows --------------------------------------------------------------------------------- */

static int class_number(const HfConfig *s, const char *key)
{
    const ClassKey *k = architecture_key(s->class, key);
    json_t *value = get(s->json, key);
    if (value && (!json_is_integer(value) || json_integer_value(value) < 0 ||
                  json_integer_value(value) > MAX_LAYERS))
        wrong(s, key, "a number of layers", value);
    return value ? (int)json_integer_value(value) : k ? (int)k->default_value : 0;
}

/* Without layer_types, the blocks from max_window_layers on have a sliding window; in some classes,
 * every n-th of these blocks has none. */
static void read_layer_types(ModelConfig *m, const HfConfig *s)
{
    const json_t *types = get(s->json, "layer_types");
    const ClassKey *key = architecture_key(s->class, "layer_types");
    const int first = class_number(s, "max_window_layers"),
              every = key ? (int)key->default_value : 0;
    m->layer_types.count = m->n_layers;
    if (types && json_array_size(types) != (size_t)m->n_layers)
        wrong(s, "layer_types", "a list with one type for each of the num_hidden_layers layers",
              types);
    for (int l = 0; l < m->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        const bool slides = type && strcmp(type, "sliding_attention") == 0;
        if (types && !slides && (!type || strcmp(type, "full_attention") != 0))
            wrong(s, "layer_types", "sliding_attention and full_attention", types);
        m->layer_types.marked[l] =
            types ? slides
                  : m->sliding_window > 0 && l >= first && (every == 0 || (l + 1) % every != 0);
    }
}

/* no_rope_layers has 0 for a block without rotary embedding, and 1 for a block with it. Without
 * this key, every n-th block has no rotary embedding. */
static void read_no_rope(ModelConfig *m, const HfConfig *s)
{
    const json_t *list = get(s->json, "no_rope_layers");
    int n = class_number(s, "no_rope_layer_interval");
    if (!architecture_key(s->class, "no_rope_layers"))
        return;
    if (!list && n == 0)
        wrong(s, "no_rope_layer_interval", "1 or more", get(s->json, "no_rope_layer_interval"));
    for (n = list ? 0 : n;
         list && n < m->n_layers && json_integer_value(json_array_get(list, (size_t)n)) != 0;)
        n++;
    m->no_rope_interval = list ? n + 1 : n;
    for (int l = 0; list && l < m->n_layers; l++) {
        const json_t *rotates = json_array_get(list, (size_t)l);
        if (!json_is_integer(rotates) ||
            json_integer_value(rotates) != ((l + 1) % m->no_rope_interval != 0))
            wrong(s, "no_rope_layers",
                  "a list with a number for each layer: 0 for every n-th layer, else 1", list);
    }
}

static void read_windows(ModelConfig *m, const HfConfig *s)
{
    const Windows windows = s->class->windows;
    const json_t *use = get(s->json, "use_sliding_window");
    const bool may_be_off = architecture_key(s->class, "use_sliding_window") != NULL;
    m->layer_types.count = 0;
    if (may_be_off && use && !json_is_boolean(use))
        wrong(s, "use_sliding_window", "true or false", use);
    if (windows == NO_WINDOW || (may_be_off && !json_is_true(use)))
        m->sliding_window = 0;
    if (windows == WINDOW_BY_LAYER)
        read_layer_types(m, s);
    read_no_rope(m, s);
    model_rules_windows(m, s->path);
}

/* Block l has one MLP if mlp_only_layers lists it or decoder_sparse_step does not divide l + 1. */
static void read_dense(ModelConfig *m, const HfConfig *s)
{
    static const HfKey width = { "intermediate_size", HF_VALUE, "model.dense_intermediate_size",
                                 NAN };
    const json_t *list = get(s->json, "mlp_only_layers");
    const int step = class_number(s, "decoder_sparse_step");
    LayerTypes *dense = &m->experts.dense;
    if (!architecture_key(s->class, "decoder_sparse_step"))
        return;
    if (step < 1)
        wrong(s, "decoder_sparse_step", "1 or more", get(s->json, "decoder_sparse_step"));
    dense->count = m->n_layers;
    for (int l = 0; l < m->n_layers; l++)
        dense->marked[l] = (l + 1) % step != 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *l = json_array_get(list, i);
        if (!json_is_integer(l) || json_integer_value(l) < 0 ||
            json_integer_value(l) >= m->n_layers)
            wrong(s, "mlp_only_layers", "a list of numbers of layers, from 0", list);
        dense->marked[json_integer_value(l)] = true;
    }
    read_value(m, s, s->json, &width);
    model_rules_experts(m, s->path);
}

/* transformers adds the load-balancing loss to the loss if output_router_logits is true. It reads
 * num_local_experts as another name of num_experts. */
static void read_router(ModelConfig *m, const HfConfig *s)
{
    static const HfKey local = { "num_local_experts", HF_VALUE, "model.num_experts", NAN };
    const json_t *adds = get(s->json, "output_router_logits");
    if (!s->class->experts)
        return;
    if (get(s->json, local.key))
        read_value(m, s, s->json, &local);
    if (adds && !json_is_boolean(adds))
        wrong(s, "output_router_logits", "true or false", adds);
    m->experts.balance = json_is_true(adds) ? BALANCE_POOLED : BALANCE_NONE;
    read_dense(m, s);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* Some classes are read as another class if layer_types is given. */
static const Architecture *with_layers(const HfConfig *s, const Architecture *a)
{
    return a && a->with_layer_types && get(s->json, "layer_types")
               ? architecture_find(a->with_layer_types)
               : a;
}

/* NOTE: transformers chooses by model_type, vLLM by architectures. */
static void choose_class(HfConfig *s)
{
    const json_t *list = get(s->json, "architectures");
    const char *class = json_string_value(json_array_get(list, 0)),
               *type = json_string_value(get(s->json, "model_type"));
    if (list && !json_is_array(list))
        wrong(s, "architectures", "a list with the name of a class", list);
    s->class = with_layers(s, class  ? architecture_find(class)
                              : type ? architecture_of_type(type)
                                     : NULL);
    if (!s->class)
        die("%s: architecture %s (model_type %s) is not supported, only %s", s->path,
            class ? class : "missing", type ? type : "missing", architecture_names());
    if (type && with_layers(s, architecture_of_type(type)) != s->class)
        die("%s: model_type is %s, but its architectures belong to the model_type %s; correct "
            "model_type or architectures: some programs read model_type, others architectures",
            s->path, type, s->class->model_type);
}

/* Opens FOLDER/config.json. For a model with images s->json is its text_config, and m->image is
 * set. */
static void open_config(HfConfig *s, ModelConfig *m, const char *folder)
{
    snprintf(s->path, sizeof s->path, "%s/config.json", folder);
    s->json = file_json(folder, "config.json", 0);
    if (!s->json)
        die("%s: there is no such file; load_path must be a folder written by save_pretrained or a "
            "checkpoint stepN",
            s->path);
    /* some folders lack this file */
    s->generation = file_try_json(folder, "generation_config.json");
    quantized_refuse(s->json, folder);
    json_t *text = llava_text(m, s->json, s->path);
    if (text) {
        json_decref(s->json);
        s->json = text;
    }
    choose_class(s);
}

void hf_read(ModelConfig *m, const char *folder)
{
    HfConfig s;
    open_config(&s, m, folder);
    const Architecture *a = m->architecture = s.class;
    m->norm = (Norm){ a->norm, a->norm_eps };
    m->norm_affine = a->norm_affine;
    m->norm_after = a->norm_after;
    m->qkv_bias = a->qkv_bias;
    m->qk_norm = a->qk_norm;
    m->clip_qkv = 0;
    m->experts.count = 0;
    m->experts.dense = (LayerTypes){ 0 };
    m->sliding_window = 0;
    m->no_rope_interval = 0;
    for (const HfKey *k = hf_keys; k->key; k++) {
        const int kind = k->kind & HF_KIND_MASK;
        if (!hf_key_is_of(k, a))
            continue;
        if (kind == HF_ONLY || kind == HF_REFUSED)
            refuse_others(&s, s.json, k);
        else if (kind == HF_VALUE)
            read_value(m, &s, s.json, k);
        else if (kind == HF_TOKEN)
            read_token(m, &s, k);
    }
    m->embedding_size = (m->vocab_size + 127) / 128 * 128;
    const HeadKeys keys = { .width = "hidden_size",
                            .heads = { "num_attention_heads", s.path },
                            .kv_heads = { "num_key_value_heads", s.path },
                            .head_dim = { "head_dim", s.path } };
    model_rules_heads(m, &keys);
    const ConfigKey *width = key_find("model.head_dim");
    if (m->head_dim < width->min || m->head_dim > width->max)
        die("%s: num_attention_heads: expected heads of %g to %g of the hidden_size %d, found %d "
            "heads of %d",
            s.path, width->min, width->max, m->d_model, m->n_heads, m->head_dim);
    read_rope(m, &s);
    model_rules_rope(m, s.path);
    read_windows(m, &s);
    read_router(m, &s);
    warn_of_unknown(&s, s.json, -1);
    json_decref(s.json);
    json_decref(s.generation);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Returns the double nearest to the short decimal form of x: 1e-05, not 9.99999974e-06. */
static json_t *decimal(float x)
{
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)x);
    return json_real(strtod(text, NULL));
}

static json_t *json_of(const ModelConfig *c, const HfKey *k)
{
    const ConfigKey row = row_of(k);
    const void *field = (const char *)c + row.offset;
    switch (row.type & TYPE_MASK) {
    case INT:
        return *(const int *)field == row.none ? json_null() : json_integer(*(const int *)field);
    case FLOAT:
        return *(const float *)field == row.none ? json_null() : decimal(*(const float *)field);
    case DOUBLE: return json_real(*(const double *)field);
    default: return json_boolean(*(const bool *)field);
    }
}

/* Returns rope_type and its parameters. */
static json_t *scaling_json(const ModelConfig *c, RopeType type)
{
    json_t *j = json_pack("{s:s}", "rope_type", rope_types[type]);
    for (const HfRopeKey *row = hf_rope_keys; row->key.key; row++) {
        const HfKey *k = &row->key;
        bool given = k->kind == HF_VALUE && (strcmp(k->key, "attention_factor") != 0 ||
                                             c->rope_scaling.attention_factor > 0);
        if (given && row->types >> type & 1)
            json_object_set_new(j, k->key, json_of(c, k));
    }
    return j;
}

static json_t *rotation_json(const ModelConfig *c, const Architecture *a, const char *key)
{
    const RopeType type = c->rope_scaling.type;
    if (strcmp(key, "rope_theta") == 0)
        return json_real(c->rope_theta);
    if (strcmp(key, "rope_scaling") == 0)
        return type == ROPE_DEFAULT ? json_null() : scaling_json(c, type);
    if (!a->full_attn_scaled_only || strcmp(key, "rope_parameters") != 0)
        return NULL;
    /* transformers 5 would apply rope_theta to one layer type only */
    json_t *full = scaling_json(c, type), *sliding = scaling_json(c, ROPE_DEFAULT);
    json_object_set_new(full, "rope_theta", json_real(c->rope_theta));
    json_object_set_new(sliding, "rope_theta", json_real(c->rope_theta));
    return json_pack("{s:o, s:o}", "full_attention", full, "sliding_attention", sliding);
}

static json_t *blocks_json(const ModelConfig *c, const char *key)
{
    int first = 0;
    while (first < c->n_layers && !layer_slides(c, first))
        first++;
    if (strcmp(key, "use_sliding_window") == 0)
        return json_boolean(c->sliding_window > 0);
    if (strcmp(key, "max_window_layers") == 0)
        return json_integer(first);
    if (strcmp(key, "no_rope_layer_interval") == 0)
        return json_integer(c->no_rope_interval > 0 ? c->no_rope_interval : c->n_layers + 1);
    json_t *list = json_array();
    for (int l = 0; l < c->n_layers; l++)
        if (strcmp(key, "no_rope_layers") == 0)
            json_array_append_new(list, json_integer(layer_rotation(c, l) != NO_ROTATION));
        else
            json_array_append_new(
                list, json_string(layer_slides(c, l) ? "sliding_attention" : "full_attention"));
    return list;
}

static json_t *router_json(const ModelConfig *c, const char *key)
{
    if (strcmp(key, "num_local_experts") == 0)
        return json_integer(c->experts.count);
    if (strcmp(key, "output_router_logits") == 0)
        return json_boolean(c->experts.balance == BALANCE_POOLED);
    if (strcmp(key, "decoder_sparse_step") == 0)
        return json_integer(1);
    if (strcmp(key, "intermediate_size") == 0)
        return c->experts.dense_width > 0 ? json_integer(c->experts.dense_width) : NULL;
    json_t *list = json_array();
    for (int l = 0; l < c->n_layers; l++)
        if (layer_experts(c, l) == 0)
            json_array_append_new(list, json_integer(l));
    return list;
}

/* The only supported value, or the first of a list of supported values. */
static json_t *literal_json(const char *text)
{
    json_t *value = json_loads(text, JSON_DECODE_ANY, NULL),
           *first = json_incref(json_array_get(value, 0));
    if (!first)
        return value;
    json_decref(value);
    return first;
}

/* Returns NULL if this class does not write the key. */
static json_t *key_json(const ModelConfig *c, const Architecture *a, const HfKey *k)
{
    /* OLMo's classes do not declare head_dim, but use it if it is given */
    bool implied = strcmp(k->key, "head_dim") == 0 && c->head_dim * c->n_heads == c->d_model;
    if ((implied && !architecture_key(a, k->key)) || !hf_key_is_of(k, a))
        return NULL;
    /* OLMo-3 always has a window size, even if no layer uses it */
    if (strcmp(k->key, "sliding_window") == 0 && c->sliding_window == 0 &&
        a->windows == WINDOW_BY_LAYER && !architecture_key(a, "use_sliding_window"))
        return json_integer((json_int_t)architecture_key(a, k->key)->default_value);
    switch (k->kind & HF_KIND_MASK) {
    case HF_VALUE:
    case HF_TOKEN:
    case HF_WRITTEN: return json_of(c, k);
    case HF_LITERAL:
    case HF_ONLY: return literal_json(k->what);
    case HF_ROTATION: return rotation_json(c, a, k->key);
    case HF_BLOCKS: return blocks_json(c, k->key);
    case HF_ROUTER: return router_json(c, k->key);
    default: return NULL;
    }
}

json_t *hf_config(const ModelConfig *c, DType master)
{
    const Architecture *a = architecture_of(c);
    json_t *j = json_pack("{s:[s], s:s, s:s}", "architectures", a->class, "model_type",
                          a->model_type, "torch_dtype", master == F32 ? "float32" : "bfloat16");
    CHECK(j, "config.json cannot be described");
    for (const HfKey *k = hf_keys; k->key; k++) {
        json_t *value = key_json(c, a, k);
        if (value)
            json_object_set_new(j, k->key, value);
    }
    return c->image.feature_size > 0 ? llava_config(c, j) : j;
}
