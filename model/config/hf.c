/* config.json: one table of its keys, in the order in which they are written. What a key has in common with one of ours (type,
 * range, place in the ModelConfig) is that row of config_keys; which classes have it, and with which default, say the rows of
 * architecture.c. transformers 4 has rope_theta and rope_scaling, 5 rope_parameters; both read what is written here. */
#include "model/config/hf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/error.h"
#include "model/config/table.h"

typedef enum {
    VALUE,          /* a number or a truth value of the ModelConfig                                     */
    TOKEN,          /* the same, a token id: of a list the first; -1 if it is not in the vocabulary     */
    WRITTEN,        /* the same, not read                                                               */
    LITERAL,        /* `what`, not read                                                                 */
    ONLY,           /* `what`; any other value is refused                                               */
    REFUSED,        /* the same, not written                                                            */
    ROTATION,       /* read_rope                                                                        */
    BLOCKS,         /* read_windows                                                                     */
    KIND_MASK = 15,
    LISTED = 16     /* flag: only classes that list the key have it                                     */
} Kind;

typedef struct {
    const char *key;
    int         kind;
    const char *what;           /* the key of config_keys; JSON                                         */
    double      otherwise;      /* if neither file nor class has one; NAN: the file must                */
} Key;

static const Key keys[] = {
    { "hidden_act",              ONLY,     "\"silu\"" },
    { "attention_bias",          ONLY,     "false" },
    { "attention_dropout",       LITERAL,  "0.0" },
    { "initializer_range",       WRITTEN,  "model.init_std" },
    { "use_cache",               LITERAL,  "true" },
    { "hidden_size",             VALUE,    "model.d_model", NAN },
    { "intermediate_size",       VALUE,    "model.mlp_hidden_size", NAN },
    { "num_hidden_layers",       VALUE,    "model.n_layers", NAN },
    { "num_attention_heads",     VALUE,    "model.n_heads", NAN },
    { "num_key_value_heads",     VALUE,    "model.n_kv_heads", 0 },
    { "max_position_embeddings", VALUE,    "model.max_sequence_length", 2048 },
    { "vocab_size",              VALUE,    "model.vocab_size", NAN },
    { "partial_rotary_factor",   REFUSED,  "1.0" },
    { "rope_theta",              ROTATION },
    { "rope_scaling",            ROTATION },
    { "tie_word_embeddings",     VALUE,    "model.weight_tying", 0 },
    { "bos_token_id",            LITERAL,  "null" },
    { "eos_token_id",            TOKEN,    "model.eos_token_id" },
    { "pad_token_id",            TOKEN,    "model.pad_token_id" },
    { "head_dim",                VALUE,    "model.head_dim", 0 },
    { "mlp_bias",                ONLY | LISTED,  "false" },
    { "clip_qkv",                VALUE | LISTED, "model.clip_qkv" },
    { "rms_norm_eps",            VALUE | LISTED, "model.layer_norm_eps" },
    { "use_sliding_window",      BLOCKS | LISTED },
    { "sliding_window",          VALUE | LISTED, "model.sliding_window" },
    { "max_window_layers",       BLOCKS | LISTED },
    { "layer_types",             BLOCKS | LISTED },
    { "rope_parameters",         ROTATION },
};
enum { NUM_KEYS = sizeof keys / sizeof keys[0] };

/* Keys of rope_scaling and rope_parameters, and the types that have them. */
static const struct { Key key; unsigned types; } rope_keys[] = {
    { { "factor",           VALUE, "model.rope_scaling.factor", NAN },               1 << ROPE_LLAMA3 | 1 << ROPE_YARN },
    { { "attention_factor", VALUE, "model.rope_scaling.attention_factor", 0 },       1 << ROPE_YARN },
    { { "beta_fast",        VALUE, "model.rope_scaling.beta_fast", 32 },             1 << ROPE_YARN },
    { { "beta_slow",        VALUE, "model.rope_scaling.beta_slow", 1 },              1 << ROPE_YARN },
    { { "low_freq_factor",  VALUE, "model.rope_scaling.low_freq_factor", 1 },        1 << ROPE_LLAMA3 },
    { { "high_freq_factor", VALUE, "model.rope_scaling.high_freq_factor", 4 },       1 << ROPE_LLAMA3 },
    { { "original_max_position_embeddings", VALUE, "model.rope_scaling.original_max_position_embeddings", 8192 },
      1 << ROPE_LLAMA3 | 1 << ROPE_YARN },
    { { "truncate",              REFUSED, "true" },                                  1 << ROPE_YARN },
    { { "mscale",                REFUSED, "null" },                                  1 << ROPE_YARN },
    { { "mscale_all_dim",        REFUSED, "null" },                                  1 << ROPE_YARN },
    { { "partial_rotary_factor", REFUSED, "1.0" },                                   1 << ROPE_LLAMA3 | 1 << ROPE_YARN },
};
enum { NUM_ROPE_KEYS = sizeof rope_keys / sizeof rope_keys[0] };
static const char *const rope_types[NUM_ROPE_TYPES] = { "default", "llama3", "yarn" };

/* The row of config_keys, its place counted in the ModelConfig. */
static ConfigKey row_of(const Key *k)
{
    ConfigKey row = *config_key(k->what);
    row.place -= offsetof(Settings, c.model);
    if (strcmp(k->what, "model.mlp_hidden_size") == 0) {        /* both halves there, one here */
        row.type = INT;
        row.min /= 2;
        row.max /= 2;
        row.place = offsetof(ModelConfig, mlp_width);
    }
    return row;
}

/* ---- reading ---------------------------------------------------------------------------------------------- */

typedef struct { json_t *json, *generation; const Architecture *class; char path[4096]; } Source;

static json_t *get(const json_t *from, const char *key)
{
    json_t *value = json_object_get(from, key);
    return json_is_null(value) ? NULL : value;
}

static _Noreturn void wrong(const Source *s, const char *key, const char *expected, const json_t *found)
{
    value_wrong_json(s->path, key, expected, found);
}

/* The value at `key` of `from`, checked; null is what it is in our configuration, if it is anything there. */
static void read_value(ModelConfig *m, const Source *s, const json_t *from, const Key *k)
{
    const ConfigKey row = row_of(k);
    const ClassKey *own = architecture_key(s->class, k->key);
    const json_t *value = json_object_get(from, k->key);
    const double otherwise = own ? own->otherwise : k->otherwise;
    if (json_is_null(value) && !isnan(row.none))
        value_set(m, &row, row.none);
    else if ((!value || json_is_null(value)) && !isnan(otherwise))
        value_set(m, &row, otherwise);
    else
        value_parse_json(m, &row, value, s->path, k->key);
}

static void read_token(ModelConfig *m, const Source *s, const Key *k)
{
    const ConfigKey row = row_of(k);
    json_t *value = get(s->json, k->key);
    if (!value)
        value = get(s->generation, k->key);
    if (json_is_array(value))
        value = json_array_get(value, 0);
    if (value && !json_is_integer(value))
        wrong(s, k->key, "a token id, a list of them or null", value);
    const json_int_t id = value ? json_integer_value(value) : -1;
    if (id >= m->vocab_size)
        warn("%s: %s %lld is beyond vocab_size %d, so there is none", s->path, k->key, (long long)id, m->vocab_size);
    value_set(m, &row, id >= 0 && id < m->vocab_size ? (double)id : -1);
}

static void refuse_others(const Source *s, const json_t *from, const Key *k)
{
    json_t *value = get(from, k->key), *only = json_loads(k->what, JSON_DECODE_ANY, NULL);
    bool same = !value || (json_is_number(only) ? json_number_value(value) == json_number_value(only) : json_equal(value, only));
    json_decref(only);
    if (!same)
        die("%s: its %s is not supported, only %s", s->path, k->key, k->what);
}

/* ---- rotation --------------------------------------------------------------------------------------------- */

static RopeType rope_type(const Source *s, const json_t *rope)
{
    const json_t *given = get(rope, "rope_type") ? get(rope, "rope_type") : get(rope, "type");
    const char *type = json_string_value(given);
    if (given && !type)
        wrong(s, "rope_type", "default, llama3 or yarn", given);
    for (int i = 0; type && i < NUM_ROPE_TYPES; i++)
        if (strcmp(type, rope_types[i]) == 0)
            return (RopeType)i;
    if (type)
        die("%s: rope_type '%s' is not supported, only default, llama3 and yarn", s->path, type);
    return ROPE_DEFAULT;
}

static double read_theta(const Source *s, const json_t *rope)
{
    static const Key key = { "rope_theta", VALUE, "model.rope_theta", 10000 };
    ModelConfig m;
    read_value(&m, s, get(rope, "rope_theta") ? rope : s->json, &key);
    return m.rope_theta;
}

/* With a description per layer type: that of full attention. The other must be the same unscaled, for a class that knows that. */
static const json_t *full_attention(const Source *s, const json_t *full, const json_t *sliding)
{
    if (!s->class->full_attn_scaled_only)
        die("%s: rope_parameters by layer type are not supported in a %s; give one description for all layers", s->path,
            s->class->class);
    if (rope_type(s, sliding) != ROPE_DEFAULT || (sliding && read_theta(s, sliding) != read_theta(s, full)))
        die("%s: rope_parameters.sliding_attention must be of rope_type default and have the rope_theta of full_attention, %g",
            s->path, read_theta(s, full));
    return full;
}

/* NOTE: a description without layer types in a class that has them is that of full attention, as in transformers 4; transformers
 * 5.0 to 5.12 scaled all layers by it, and later ones overlook it. */
static const json_t *find_rope(const Source *s)
{
    const json_t *new = get(s->json, "rope_parameters"), *old = get(s->json, "rope_scaling"), *either = old ? old : new;
    const json_t *full = get(new, "full_attention"), *sliding = get(new, "sliding_attention");
    if (full || sliding)
        return full_attention(s, full, sliding);
    if (either && !json_is_object(either))
        wrong(s, old ? "rope_scaling" : "rope_parameters", "an object", either);
    return either;
}

static void read_rope(ModelConfig *m, const Source *s)
{
    const json_t *rope = find_rope(s);
    m->rope_theta = read_theta(s, rope);
    m->rope_scaling.type = rope_type(s, rope);
    m->rope_scaling.full_attn_layers_only = m->rope_scaling.type != ROPE_DEFAULT && s->class->full_attn_scaled_only;
    m->rope_scaling.factor = 0;
    for (int i = 0; i < NUM_ROPE_KEYS; i++) {
        Key k = rope_keys[i].key;
        if (!(rope_keys[i].types >> m->rope_scaling.type & 1))
            continue;
        if (k.kind == REFUSED) {
            refuse_others(s, rope, &k);
            continue;
        }
        if (m->rope_scaling.type == ROPE_YARN && strcmp(k.key, "original_max_position_embeddings") == 0)
            k.otherwise = m->max_sequence_length;
        read_value(m, s, rope, &k);
    }
}

/* ---- windows ---------------------------------------------------------------------------------------------- */

static int class_number(const Source *s, const char *key)
{
    const ClassKey *k = architecture_key(s->class, key);
    json_t *value = get(s->json, key);
    if (value && (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > MAX_LAYERS))
        wrong(s, key, "a number of layers", value);
    return value ? (int)json_integer_value(value) : k ? (int)k->otherwise : 0;
}

/* Without a list of them the blocks from max_window_layers on slide; where the class says so, all but every n-th. */
static void read_layer_types(ModelConfig *m, const Source *s)
{
    const json_t *types = get(s->json, "layer_types");
    const ClassKey *key = architecture_key(s->class, "layer_types");
    const int first = class_number(s, "max_window_layers"), every = key ? (int)key->otherwise : 0;
    m->layer_types.count = m->n_layers;
    if (types && json_array_size(types) != (size_t)m->n_layers)
        wrong(s, "layer_types", "one for each of num_hidden_layers", types);
    for (int l = 0; l < m->n_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        const bool slides = type && strcmp(type, "sliding_attention") == 0;
        if (types && !slides && (!type || strcmp(type, "full_attention") != 0))
            wrong(s, "layer_types", "sliding_attention and full_attention", types);
        m->layer_types.slides[l] = types ? slides : m->sliding_window > 0 && l >= first && (every == 0 || (l + 1) % every != 0);
    }
}

static void read_windows(ModelConfig *m, const Source *s)
{
    const Windows windows = s->class->windows;
    m->layer_types.count = 0;
    if (windows == NO_WINDOW || (architecture_key(s->class, "use_sliding_window") &&
                                 !json_is_true(json_object_get(s->json, "use_sliding_window"))))
        m->sliding_window = 0;
    if (windows == WINDOW_BY_LAYER)
        read_layer_types(m, s);
    config_settle_windows(m, s->path);
}

/* ---- the file --------------------------------------------------------------------------------------------- */

static void open_source(Source *s, const char *folder)
{
    json_error_t error;
    snprintf(s->path, sizeof s->path, "%s/config.json", folder);
    check_regular(s->path);
    s->json = json_load_file(s->path, 0, &error);
    if (!s->json && error.line < 1)
        die("%s: cannot be read: %s; load_path must be a folder written by save_pretrained or a checkpoint stepN",
            s->path, error.text);
    if (!s->json)
        die("%s:%d: not JSON: %s", s->path, error.line, error.text);
    char *generation = xasprintf("%s/generation_config.json", folder);
    check_regular(generation);
    s->generation = json_load_file(generation, 0, NULL);        /* which not every folder has */
    free(generation);
    const char *class = json_string_value(json_array_get(get(s->json, "architectures"), 0));
    const char *type = json_string_value(get(s->json, "model_type"));
    s->class = class ? architecture_find(class) : type ? architecture_of_type(type) : NULL;     /* as AutoModelForCausalLM does */
    if (!s->class)
        die("%s: architecture %s (model_type %s) is not supported, only %s", s->path, class ? class : "missing",
            type ? type : "missing", architecture_names());
}

bool hf_is_in_4_bits(const char *folder)
{
    char *path = xasprintf("%s/config.json", folder);
    check_regular(path);
    json_t *config = json_load_file(path, 0, NULL);
    const bool found = json_is_true(json_object_get(json_object_get(config, "quantization_config"), "load_in_4bit"));
    json_decref(config);
    free(path);
    return found;
}

static void settle_heads(ModelConfig *m, const Source *s)
{
    if (m->n_kv_heads == 0)
        m->n_kv_heads = m->n_heads;
    if (m->n_heads % m->n_kv_heads != 0)
        die("%s: num_key_value_heads: expected a divisor of num_attention_heads %d, found %d", s->path, m->n_heads, m->n_kv_heads);
    if (m->head_dim == 0 && m->d_model % m->n_heads != 0)
        die("%s: num_attention_heads: expected a divisor of hidden_size %d, found %d; other heads need head_dim", s->path,
            m->d_model, m->n_heads);
    if (m->head_dim == 0)
        m->head_dim = m->d_model / m->n_heads;
    const ConfigKey *width = config_key("model.head_dim");
    if (m->head_dim < width->min || m->head_dim > width->max)
        die("%s: num_attention_heads: expected heads of %g to %g of the hidden_size %d, found %d heads of %d", s->path, width->min,
            width->max, m->d_model, m->n_heads, m->head_dim);
    if (m->head_dim % 2 != 0)
        die("%s: head_dim: expected an even number, as rotary positions turn pairs, found %d", s->path, m->head_dim);
}

void config_read_hf(ModelConfig *m, const char *folder)
{
    Source s;
    open_source(&s, folder);
    const Architecture *a = m->architecture = s.class;
    m->norm = (Norm){ a->norm, a->norm_eps };
    m->norm_affine = a->norm_affine;
    m->norm_after = a->norm_after;
    m->qk_norm = a->qk_norm;
    m->clip_qkv = 0;
    m->sliding_window = 0;
    for (int i = 0; i < NUM_KEYS; i++) {
        const Key *k = &keys[i];
        const int kind = k->kind & KIND_MASK;
        if (kind == ONLY || kind == REFUSED)
            refuse_others(&s, s.json, k);
        else if ((kind == VALUE || kind == TOKEN) && (!(k->kind & LISTED) || architecture_key(a, k->key)))
            kind == VALUE ? read_value(m, &s, s.json, k) : read_token(m, &s, k);
    }
    m->embedding_size = (m->vocab_size + 127) / 128 * 128;
    settle_heads(m, &s);
    read_rope(m, &s);
    config_check_rope(m, s.path);
    read_windows(m, &s);
    json_decref(s.json);
    json_decref(s.generation);
}

/* ---- writing ---------------------------------------------------------------------------------------------- */

/* The decimal number somebody wrote, not the float next to it: 1e-05, not 9.99999974e-06. */
static json_t *decimal(float x)
{
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)x);
    return json_real(strtod(text, NULL));
}

static json_t *value_json(const ModelConfig *c, const Key *k)
{
    const ConfigKey row = row_of(k);
    const void *place = (const char *)c + row.place;
    switch (row.type & TYPE_MASK) {
    case INT:    return *(const int *)place == row.none ? json_null() : json_integer(*(const int *)place);
    case FLOAT:  return *(const float *)place == row.none ? json_null() : decimal(*(const float *)place);
    case DOUBLE: return json_real(*(const double *)place);
    default:     return json_boolean(*(const bool *)place);
    }
}

/* rope_type and what belongs to it. */
static json_t *scaling_json(const ModelConfig *c, RopeType type)
{
    json_t *j = json_pack("{s:s}", "rope_type", rope_types[type]);
    for (int i = 0; i < NUM_ROPE_KEYS; i++) {
        const Key *k = &rope_keys[i].key;
        bool given = k->kind == VALUE && (strcmp(k->key, "attention_factor") != 0 || c->rope_scaling.attention_factor > 0);
        if (given && rope_keys[i].types >> type & 1)
            json_object_set_new(j, k->key, value_json(c, k));
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
    if (!a->full_attn_scaled_only)
        return NULL;
    /* transformers 5 would take rope_theta for one layer type only */
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
    json_t *list = json_array();
    for (int l = 0; l < c->n_layers; l++)
        json_array_append_new(list, json_string(layer_slides(c, l) ? "sliding_attention" : "full_attention"));
    return list;
}

/* NULL: this class is written without the key. */
static json_t *key_json(const ModelConfig *c, const Architecture *a, const Key *k)
{
    /* OLMo's classes know no head_dim of their own, but take one that is given */
    bool implied = strcmp(k->key, "head_dim") == 0 && c->head_dim * c->n_heads == c->d_model;
    if ((implied || k->kind & LISTED) && !architecture_key(a, k->key))
        return NULL;
    /* OLMo-3 has a window, if for no layer */
    if (strcmp(k->key, "sliding_window") == 0 && c->sliding_window == 0 && a->windows == WINDOW_BY_LAYER &&
        !architecture_key(a, "use_sliding_window"))
        return json_integer((json_int_t)architecture_key(a, k->key)->otherwise);
    switch (k->kind & KIND_MASK) {
    case VALUE: case TOKEN: case WRITTEN: return value_json(c, k);
    case LITERAL: case ONLY:              return json_loads(k->what, JSON_DECODE_ANY, NULL);
    case ROTATION:                        return rotation_json(c, a, k->key);
    case BLOCKS:                          return blocks_json(c, k->key);
    default:                              return NULL;
    }
}

json_t *hf_config(const ModelConfig *c, DType master)
{
    const Architecture *a = architecture_of(c);
    json_t *j = json_pack("{s:[s], s:s, s:s}", "architectures", a->class, "model_type", a->model_type,
                          "torch_dtype", master == F32 ? "float32" : "bfloat16");
    CHECK(j, "config.json cannot be described");
    for (int i = 0; i < NUM_KEYS; i++) {
        json_t *value = key_json(c, a, &keys[i]);
        if (value)
            json_object_set_new(j, keys[i].key, value);
    }
    return j;
}
