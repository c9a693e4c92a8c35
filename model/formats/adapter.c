/* adapter_config.json, in the format in which PEFT's LoraConfig reads and writes it
 * [peft/tuners/lora/config.py]. */
#include "model/formats/adapter.h"

#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/formats/file.h"
#include "model/keys/key.h"
#include "model/keys/value_json.h"
#include "model/shape/architecture.h"

/* ---- modules --------------------------------------------------------------------------------- */

/* Names of modules within a block, the same in all architectures. */
static const char *const modules[NUM_LORA_MODULES] = {
    [LORA_Q] = "self_attn.q_proj", [LORA_K] = "self_attn.k_proj", [LORA_V] = "self_attn.v_proj",
    [LORA_O] = "self_attn.o_proj", [LORA_GATE] = "mlp.gate_proj", [LORA_UP] = "mlp.up_proj",
    [LORA_DOWN] = "mlp.down_proj",
};

const char *adapter_module_name(LoraModule module)
{
    return strchr(modules[module], '.') + 1;
}

/* Whether a name matches a module's path, by PEFT's rule: the name is the path, or the end of the
 * path after a dot. */
static bool is_end(const char *name, const char *path)
{
    const size_t n = strlen(name), m = strlen(path);
    return n > 0 && text_ends_with(path, name) && (n == m || path[m - n - 1] == '.');
}

LoraModule adapter_module(const char *name)
{
    int k = 0;
    while (k < NUM_LORA_MODULES && !is_end(name, modules[k]))
        k++;
    return (LoraModule)k;
}

static bool targets_all(const Lora *l)
{
    bool all = true;
    for (int k = 0; k < NUM_LORA_MODULES; k++)
        all &= l->target[k];
    return all;
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct {
    json_t *json;
    char *path;
} File;

static File open_file(const char *folder)
{
    File f = { file_json(folder, "adapter_config.json", JSON_REJECT_DUPLICATES),
               xasprintf("%s/adapter_config.json", folder) };
    const char *type = json_string_value(json_object_get(f.json, "peft_type"));
    if (!type || strcmp(type, "LORA") != 0)
        value_json_wrong(f.path, "peft_type", "\"LORA\"", json_object_get(f.json, "peft_type"));
    return f;
}

static void close_file(File *f)
{
    json_decref(f->json);
    free(f->path);
}

bool adapter_is(const char *folder)
{
    return file_is_in(folder, "adapter_config.json");
}

char *adapter_base(const char *folder)
{
    File f = open_file(folder);
    const json_t *value = json_object_get(f.json, "base_model_name_or_path");
    if (value && !json_is_null(value) && !json_is_string(value))
        value_json_wrong(f.path, "base_model_name_or_path", "a text", value);
    const char *name = json_string_value(value);
    char *relative = name && *name && *name != '/' ? xasprintf("%s/%s", folder, name) : NULL;
    const bool is_relative =
        relative && !file_is_in(name, "config.json") && file_is_in(relative, "config.json");
    char *base = is_relative ? xstrdup(relative) : name && *name ? xstrdup(name) : NULL;
    free(relative);
    close_file(&f);
    return base;
}

/* Settings that are not supported, unless their value is null, false or empty. */
static const struct {
    const char *key, *why;
} refused[] = {
    { "use_dora", "DoRA's magnitudes are not computed" },
    { "use_qalora", "QALoRA's pooled inputs are not computed" },
    { "lora_bias", "adapters have no bias" },
    { "fan_in_fan_out", "the matrices are (out, in)" },
    { "trainable_token_indices", "only adapters are trained, no tensors of the base" },
    { "exclude_modules", "only target_modules say where adapters are" },
    { "layers_to_transform", "all blocks have the same adapters" },
    { "layer_replication", "each block is computed once" },
    { "alora_invocation_tokens", "adapters apply to all tokens" },
    { "use_bdlora", "adapters have no blocks" },
    { "arrow_config", "there is one set of adapters" },
    { "kasa_config", "the base does not change" },
    { "monteclora_config", "adapters are numbers, not distributions" },
};

/* PEFT joins the adapters of gate and up of experts. The joined adapter has twice the rank and twice
 * the alpha, which patterns say. All other adapters have the rank r and the same lora_alpha. */
static void check_patterns(const File *f)
{
    static const char *const patterns[][2] = { { "rank_pattern", "r" },
                                               { "alpha_pattern", "lora_alpha" } };
    for (int i = 0; i < 2; i++) {
        json_t *pattern = json_object_get(f->json, patterns[i][0]), *value;
        const double all = json_number_value(json_object_get(f->json, patterns[i][1]));
        const char *name;
        json_object_foreach(pattern, name, value)
        {
            if (!text_ends_with(name, "gate_up_proj") || json_number_value(value) != 2 * all)
                value_json_wrong(f->path, patterns[i][0],
                                 "twice the value of all adapters for gate_up_proj, or no pattern",
                                 pattern);
        }
    }
    if (json_object_size(json_object_get(f->json, "rank_pattern")) > 0 &&
        json_is_true(json_object_get(f->json, "use_rslora")))
        die("%s: use_rslora with a rank_pattern: the joined adapters of gate and up have another "
            "scale than all others, which is not supported",
            f->path);
}

/* PiSSA, OLoRA, CorDA and LoftQ also change the base: their adapters are wrong on the published
 * base. */
static void check_start(const File *f)
{
    const json_t *value = json_object_get(f->json, "init_lora_weights");
    if (value && !json_is_null(value) && !json_is_boolean(value) &&
        !(json_is_string(value) &&
          text_is_among(json_string_value(value), "gaussian|eva|orthogonal")))
        value_json_wrong(
            f->path, "init_lora_weights",
            "an initialization that does not change the base (true, false, "
            "\"gaussian\", \"eva\", \"orthogonal\"; PEFT converts others when it saves)",
            value);
}

static void refuse_others(const File *f)
{
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const json_t *value = json_object_get(f->json, refused[i].key);
        char *text =
            value_json_is_nothing(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        if (text)
            die("%s: its %s is not supported, found %.64s: %s", f->path, refused[i].key, text,
                refused[i].why);
    }
    const json_t *bias = json_object_get(f->json, "bias");
    if (bias && !json_is_null(bias) &&
        (!json_is_string(bias) || strcmp(json_string_value(bias), "none") != 0))
        value_json_wrong(f->path, "bias", "\"none\", as only A and B are trained", bias);
    check_patterns(f);
    check_start(f);
}

/* Sets seen[module][block] for all matches of a name of target_modules: in all blocks, or in the
 * single block whose number the name contains. Returns whether there are any. */
static bool mark(bool *seen, const char *name, const ModelConfig *m)
{
    const LoraModule all = adapter_module(name);
    for (int b = 0; b < m->n_layers && all < NUM_LORA_MODULES; b++)
        seen[(size_t)all * m->n_layers + b] = true;
    for (int k = 0; k < NUM_LORA_MODULES && all == NUM_LORA_MODULES; k++) {
        const size_t n = strlen(name), end = strlen(modules[k]) + 1;
        size_t first = n > end && is_end(modules[k], name) ? n - end : 0;
        const size_t after = first;
        while (first > 0 && isdigit((unsigned char)name[first - 1]))
            first--;
        const long b = first < after && after - first < 8 ? strtol(name + first, NULL, 10) : -1;
        char file[HF_NAME], path[HF_NAME];
        snprintf(file, sizeof file, "%s%s.%ld.%s", hf_prefix(m), architecture_of(m)->blocks, b,
                 modules[k]);
        hf_tree_name(path, file);
        if (b < 0 || b >= m->n_layers || (!is_end(name, path) && !is_end(name, file)))
            continue;
        seen[(size_t)k * m->n_layers + b] = true;
        return true;
    }
    return all < NUM_LORA_MODULES;
}

/* The header of the adapters' file, which contains the names of its tensors; NULL: the header
 * cannot be read. */
static json_t *read_header(const char *folder)
{
    enum { LENGTH = 8, MOST = 100 << 20 };
    char *path = xasprintf("%s/adapter_model.safetensors", folder), *text = NULL;
    unsigned char length[LENGTH];
    uint64_t n = 0;
    check_regular(path);
    FILE *file = fopen(path, "rb");
    for (int i = file && fread(length, 1, LENGTH, file) == LENGTH ? LENGTH - 1 : -1; i >= 0; i--)
        n = n << 8 | length[i];
    if (n > 0 && n <= MOST) {
        text = xmalloc(n);
        n = fread(text, 1, n, file);
    }
    json_t *header = text ? json_loadb(text, n, 0, NULL) : NULL;
    if (file)
        fclose(file);
    free(text);
    free(path);
    return header;
}

/* A text other than all-linear is a regular expression of Python, which PEFT matches with the paths
 * of modules. The tensors of the file show which modules it matched. */
static void mark_found(bool *seen, const char *folder, const File *f, const ModelConfig *m)
{
    static const char first[] = "base_model.model.", last[] = ".lora_A.weight",
                      usual[] = ".lora_A.default.weight";
    json_t *header = read_header(folder), *value;
    const char *name, *expression = json_string_value(json_object_get(f->json, "target_modules"));
    if (!json_is_object(header))
        die("%s: target_modules %.200s is a regular expression, so adapter_model.safetensors says "
            "which modules have adapters, but "
            "the header of adapter_model.safetensors cannot be read",
            f->path, expression);
    json_object_foreach(header, name, value)
    {
        const char *end = text_ends_with(name, last)    ? last
                          : text_ends_with(name, usual) ? usual
                                                        : NULL;
        if (!end || strncmp(name, first, sizeof first - 1) != 0)
            continue;
        char *path = xasprintf("%.*s", (int)(strlen(name) - strlen(end) - (sizeof first - 1)),
                               name + sizeof first - 1);
        char tree[HF_NAME];
        hf_tree_name(tree, path);
        if (!mark(seen, tree, m))
            die("%s: target_modules %.200s gave %s an adapter; only matrices of the language "
                "model's blocks can have one",
                f->path, expression, path);
        free(path);
    }
    json_decref(header);
}

/* target_parameters of PEFT: the matrices of all experts as one tensor. */
static void mark_parameters(bool *seen, const File *f, const ModelConfig *m)
{
    json_t *list = json_object_get(f->json, "target_parameters"), *name;
    size_t i;
    json_array_foreach(list, i, name)
    {
        const char *text = json_is_string(name) ? json_string_value(name) : "";
        const bool down = text_ends_with(text, "down_proj");
        if (m->experts.count == 0 || (!down && !text_ends_with(text, "gate_up_proj")))
            value_json_wrong(f->path, "target_parameters",
                             "experts.gate_up_proj and experts.down_proj, in a model with experts",
                             list);
        for (int b = 0; b < m->n_layers; b++)
            for (LoraModule k = down ? LORA_DOWN : LORA_GATE; k <= (down ? LORA_DOWN : LORA_UP);
                 k++)
                seen[(size_t)k * m->n_layers + b] = true;
    }
}

static void read_modules(Lora *l, const File *f, const char *folder, const ModelConfig *m)
{
    const json_t *value = json_object_get(f->json, "target_modules"), *name;
    const char *text = json_string_value(value), *key = "target_modules";
    const bool all = text && strcmp(text, "all-linear") == 0;
    bool *seen = xcalloc((size_t)NUM_LORA_MODULES * m->n_layers, sizeof *seen);
    size_t i;
    if (text ? !*text
             : json_array_size(value) == 0 &&
                   json_array_size(json_object_get(f->json, "target_parameters")) == 0)
        value_json_wrong(f->path, key,
                         "\"all-linear\", a list of names as \"q_proj\" or a regular expression",
                         value);
    json_array_foreach(value, i,
                       name) if (!json_is_string(name) || !mark(seen, json_string_value(name), m))
        value_json_wrong(f->path, key,
                         "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj, or the "
                         "path of one of "
                         "these in the base model",
                         name);
    if (text && !all)
        mark_found(seen, folder, f, m);
    mark_parameters(seen, f, m);
    for (int k = 0; k < NUM_LORA_MODULES; k++) {
        int blocks = 0;
        for (int b = 0; b < m->n_layers; b++)
            blocks += all || seen[(size_t)k * m->n_layers + b];
        if (blocks > 0 && blocks < m->n_layers)
            die("%s: %s: %s has an adapter in %d of %d blocks; only the same adapters in all "
                "blocks are supported",
                f->path, key, adapter_module_name((LoraModule)k), blocks, m->n_layers);
        l->target[k] = blocks > 0;
    }
    free(seen);
}

/* Sets what is trained whole, besides the adapters: the projector of a model with images, or
 * nothing. */
static void read_saved(Lora *l, const File *f, const ModelConfig *m)
{
    const json_t *value = json_object_get(f->json, "modules_to_save"), *name;
    const bool images = m->image.feature_size > 0;
    bool fits = value_json_is_nothing(value) || (images && json_is_array(value));
    size_t i;
    json_array_foreach(value, i, name) fits &=
        json_is_string(name) && is_end(json_string_value(name), "model.multi_modal_projector");
    if (!fits)
        die("%s: its modules_to_save is not supported, found %.64s: next to adapters %s", f->path,
            json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT),
            images ? "only multi_modal_projector is trained"
                   : "no tensors of the base are trained");
    if (images)
        l->projector = !value_json_is_nothing(value);
}

static void read_value(Lora *l, const File *f, const char *key, const char *ours)
{
    ConfigKey row = *key_find(ours);
    row.offset -= offsetof(Settings, c.model.lora);
    value_json_parse(l, &row, json_object_get(f->json, key), f->path, key);
}

void adapter_read(Lora *l, double *dropout, const char *folder, const ModelConfig *m)
{
    File f = open_file(folder);
    const json_t *rslora = json_object_get(f.json, "use_rslora"),
                 *chance = json_object_get(f.json, "lora_dropout");
    refuse_others(&f);
    read_value(l, &f, "r", "lora.rank");
    read_value(l, &f, "lora_alpha", "lora.alpha");
    l->use_rslora = false;
    if (rslora && !json_is_null(rslora)) /* files of old versions lack the key */
        read_value(l, &f, "use_rslora", "lora.use_rslora");
    read_modules(l, &f, folder, m);
    read_saved(l, &f, m);
    if (chance && !json_is_null(chance) && !json_is_number(chance))
        value_json_wrong(f.path, "lora_dropout", "a number", chance);
    *dropout = json_number_value(chance);
    close_file(&f);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Returns a list of names. In a model with images, returns a regular expression instead, because
 * the vision tower has modules with the same names. */
static json_t *module_names(const Lora *l, bool images)
{
    json_t *names = json_array();
    char *text;
    FILE *expression = xtext(&text);
    for (int k = 0, count = 0; k < NUM_LORA_MODULES; k++)
        if (l->target[k]) {
            const char *name = adapter_module_name((LoraModule)k);
            json_array_append_new(names, json_string(name));
            fprintf(expression, "%s%s", count++ > 0 ? "|" : ".*language_model.*\\.(", name);
        }
    fputs(")", expression);
    fclose(expression);
    if (images) {
        json_decref(names);
        names = json_string(text);
    }
    free(text);
    return names;
}

char *adapter_config_text(const Config *c)
{
    const Lora *l = &c->model.lora;
    /* PEFT and vLLM require an integer */
    const bool images = c->model.image.feature_size > 0, whole = l->alpha == floor(l->alpha);
    json_t *j = json_pack(
        "{s:s, s:s, s:s?, s:n, s:b, s:i, s:o, s:f, s:o, s:s, s:b, s:b, s:b, s:b, s:{}, s:{}}",
        "peft_type", "LORA", "task_type", "CAUSAL_LM", "base_model_name_or_path", l->base_path,
        "revision", "inference_mode", true, "r", l->rank, "lora_alpha",
        whole ? json_integer((json_int_t)l->alpha) : json_real(l->alpha), "lora_dropout", 0.0,
        "target_modules", module_names(l, images), "bias", "none", "use_rslora", l->use_rslora,
        "use_dora", false, "fan_in_fan_out", false, "init_lora_weights", true, "rank_pattern",
        "alpha_pattern");
    CHECK(j, "adapter_config.json cannot be described");
    if (lora_trains_projector(&c->model))
        json_object_set_new(j, "modules_to_save", json_pack("[s]", "multi_modal_projector"));
    char *text = json_dumps(j, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    json_decref(j);
    return text;
}

char *adapter_describe(const Config *c)
{
    const Lora *l = &c->model.lora;
    char names[128] = "all linear layers";
    size_t n = 0;
    for (int k = 0; k < NUM_LORA_MODULES && !targets_all(l); k++)
        if (l->target[k])
            n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "",
                                  adapter_module_name((LoraModule)k));
    const char *base = l->base == BASE_NF4    ? "nf4"
                       : l->base == BASE_E4M3 ? "e4m3"
                                              : format_name(c->recipe.frozen);
    return xasprintf("adapters: rank %d on %s, scale %g, base in %s%s", l->rank, names,
                     lora_scale(l), base,
                     lora_trains_projector(&c->model) ? "; the projector is trained, too" : "");
}
