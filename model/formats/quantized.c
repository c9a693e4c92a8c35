/* Tables to detect quantized weights and their method: settings that other programs write, and
 * tensors that they save. */
#include "model/formats/quantized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/formats/file.h"
#include "model/keys/value.h"

#define LOAD_16_BIT "which is not supported; load the 16-bit folder from which they were quantized"

/* The methods that can be read, and the values that their keys must have. If "null" is one of the
 * values, the key may be missing. A * in a key stands for all members. All other properties follow
 * from the tensors. */
#define FORMATS "float-quantized|int-quantized|naive-quantized|pack-quantized"
#define WEIGHTS "config_groups.*.weights."
static const struct {
    const char *method, *key, *values;
} readable[] = {
    /* fp4 is refused later, by its tensors */
    { "bitsandbytes", "bnb_4bit_quant_type", "null|nf4|fp4" },
    { "fp8", "fmt", "null|e4m3|float8_e4m3fn" },
    { "fp8", "weight_block_size", "null|[128,128]" },
    { "gptq", "bits", "4" },
    { "gptq", "sym", "true" },
    { "gptq", "checkpoint_format", "null|gptq" },
    /* mixed: each group has its own format */
    { "compressed-tensors", "format", FORMATS "|mixed-precision" },
    { "compressed-tensors", "config_groups.*.format", "null|" FORMATS },
    { "compressed-tensors", WEIGHTS "num_bits", "4|8" },
    { "compressed-tensors", WEIGHTS "type", "int|float" },
    { "compressed-tensors", WEIGHTS "symmetric", "null|true" },
    { "compressed-tensors", WEIGHTS "dynamic", "null|false" },
    { "compressed-tensors", WEIGHTS "block_structure", "null|[128,128]|128x128" },
    { "compressed-tensors", "sparsity_config.format", "null|dense" },
    { "compressed-tensors", "transform_config", "null|{}" },
    { "compressed-tensors", "kv_cache_scheme", "null" },
};

/* Values of quant_method and their names in messages. Other values are printed unchanged. */
static const struct {
    const char *method, *name;
} methods[] = {
    { "gptq", "GPTQ" },
    { "awq", "AWQ" },
    { "aqlm", "AQLM" },
    { "hqq", "HQQ" },
    { "eetq", "EETQ" },
    { "quip", "QuIP" },
    { "fp8", "FP8 with a scale per block or tensor" },
    { "fbgemm_fp8", "FP8 of FBGEMM" },
    { "mxfp4", "MXFP4" },
    { "modelopt", "NVIDIA Model Optimizer" },
};

/* Suffixes of tensors that only occur together with, or in place of, quantized weights. */
static const struct {
    const char *end, *name;
} tensors[] = {
    { ".SCB", "LLM.int8() of bitsandbytes" },
    { ".weight_format", "LLM.int8() of bitsandbytes" },
    { ".weight_scale_inv", "FP8 with a scale per block" },
    { ".weight_scale", "FP8 or INT8 with scales" },
    { ".weight_scale_2", "NVFP4" },
    { ".weight_zero_point", "zero points of compressed-tensors" },
    { ".weight_packed", "compressed-tensors, packed" },
    { ".weight_shape", "compressed-tensors, packed" },
    { ".weight_g_idx", "the actorder of compressed-tensors" },
    { ".weight_global_scale", "NVFP4" },
    { ".input_scale", "FP8 with scales" },
    { ".activation_scale", "FP8 with scales" },
    { ".k_scale", "scales of keys and values" },
    { ".v_scale", "scales of keys and values" },
    { ".qweight", "GPTQ or AWQ" },
    { ".qzeros", "GPTQ or AWQ" },
    { ".scales", "GPTQ or AWQ" },
    { ".g_idx", "GPTQ" },
    { ".W_q", "HQQ" },
    { ".codebooks", "AQLM" },
    { ".weight_scales", "EETQ" },
    { ".weight._data", "Quanto" },
    { ".weight._scale", "Quanto" },
    { "_blocks", "MXFP4" },
};

/* Types of safetensors that only quantized weights have, and their names in messages. */
static const struct {
    const char *dtype, *name;
} types[] = {
    { "I8", "INT8" },     { "I32", "packed integers" }, { "F8_E4M3", "FP8" },
    { "F8_E5M2", "FP8" }, { "F8_E8M0", "FP8" },         { "F4", "FP4" },
};

/* Files that other programs write next to config.json, and the object in each file that contains
 * the settings. */
static const struct {
    const char *file, *object, *method;
} others[] = {
    { "quantize_config.json", NULL, "gptq" },
    { "quant_config.json", NULL, "awq" },
    { "hf_quant_config.json", "quantization", "modelopt" },
};

static bool is_4_bit(const json_t *settings)
{
    return json_is_true(json_object_get(settings, "load_in_4bit"));
}

/* Prints details such as ", 4 bits" or ", float-quantized". */
static void print_details(FILE *f, const json_t *settings)
{
    static const char *const bits[] = { "bits", "w_bit", "nbits", "num_bits" };
    static const char *const words[] = { "format", "quant_algo", "quant_type" };
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++)
        if (json_is_integer(json_object_get(settings, bits[i])))
            fprintf(f, ", %lld bits",
                    (long long)json_integer_value(json_object_get(settings, bits[i])));
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (json_is_string(json_object_get(settings, words[i])))
            fprintf(f, ", %.64s", json_string_value(json_object_get(settings, words[i])));
}

/* Whether the value at `path` below `at` is one of the allowed values. With a * in the path,
 * whether all members have an allowed value. */
static bool holds(json_t *at, const char *path, const char *values)
{
    char name[64];
    const size_t n = strcspn(path, ".");
    const char *key;
    json_t *member;
    snprintf(name, sizeof name, "%.*s", (int)n, path);
    if (strcmp(name, "*") == 0) {
        json_object_foreach(at, key, member) if (!holds(member, path + n + 1, values)) return false;
        return true;
    }
    member = json_object_get(at, name);
    if (path[n])
        return !member || holds(member, path + n + 1, values);
    char *text = !member                  ? xstrdup("null")
                 : json_is_string(member) ? xstrdup(json_string_value(member))
                                          : json_dumps(member, JSON_ENCODE_ANY | JSON_COMPACT);
    const bool found = text && value_is_listed(values, text);
    free(text);
    return found;
}

/* Whether weights with these settings can be read. If not, *key: the key with an unsupported value;
 * NULL: the method is not supported. */
static bool reads(json_t *settings, const char *method, const char **key)
{
    bool known = false;
    *key = NULL;
    for (size_t i = 0; method && i < sizeof readable / sizeof readable[0]; i++) {
        if (strcmp(readable[i].method, method) != 0)
            continue;
        known = true;
        if (holds(settings, readable[i].key, readable[i].values))
            continue;
        *key = readable[i].key;
        return false;
    }
    return known;
}

/* Dies unless weights with these settings can be read. method: used if the settings name no
 * method. */
static void check(const char *folder, const char *file, json_t *settings, const char *method)
{
    const char *said = json_string_value(json_object_get(settings, "quant_method")), *name, *key;
    char *text;
    method = name = said ? said : method;
    if (reads(settings, method, &key))
        return;
    FILE *f = xtext(&text);
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        if (strcmp(methods[i].method, method) == 0)
            name = methods[i].name;
    fprintf(f, "%.64s", name);
    print_details(f, settings);
    if (key)
        fprintf(f, " (key %s)", key);
    fclose(f);
    die("%s/%s: the weights are quantized with %s, " LOAD_16_BIT, folder, file, text);
}

void quantized_refuse(const json_t *config, const char *folder)
{
    static const char *const keys[] = { "quantization_config", "compression_config" };
    for (int i = 0; i < 2; i++) {
        json_t *settings = json_object_get(config, keys[i]);
        const bool bitsandbytes =
            is_4_bit(settings) || json_is_true(json_object_get(settings, "load_in_8bit"));
        if (settings && !json_is_null(settings) && !json_is_object(settings))
            die("%s/config.json: %s: expected an object; remove it if the weights are not "
                "quantized",
                folder, keys[i]);
        if (json_is_string(json_object_get(settings, "quant_method")) || bitsandbytes ||
            (i == 1 && json_object_size(settings) > 0))
            check(folder, "config.json", settings,
                  bitsandbytes ? "bitsandbytes" : "compressed-tensors");
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        json_t *file = file_try_json(folder, others[i].file);
        json_t *settings = others[i].object ? json_object_get(file, others[i].object) : file;
        if (json_object_size(settings) > 0)
            check(folder, others[i].file, settings, others[i].method);
        json_decref(file);
    }
}

void quantized_refuse_tensor(const char *path, const char *name, const char *dtype)
{
    const char *with = NULL;
    for (size_t i = 0; i < sizeof types / sizeof types[0] && text_ends_with(name, ".weight"); i++)
        if (strcmp(types[i].dtype, dtype) == 0)
            with = types[i].name;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (text_ends_with(name, tensors[i].end))
            with = tensors[i].name;
    if (with)
        die("%s: tensor %s is stored as %s: the weights are quantized with %s, " LOAD_16_BIT, path,
            name, dtype, with);
}

/* The settings of a folder that quantized_refuse accepts; the caller owns them. */
static json_t *settings_of(const char *folder)
{
    json_t *config = file_try_json(folder, "config.json"),
           *settings = json_object_get(config, "quantization_config");
    if (json_object_size(settings) == 0)
        settings = json_object_get(config, "compression_config");
    settings = json_object_size(settings) ? json_incref(settings)
                                          : file_try_json(folder, "quantize_config.json");
    json_decref(config);
    return settings;
}

/* Reads a member of config_groups. */
static Coding coding_of(const json_t *weights)
{
    const json_t *group = json_object_get(weights, "group_size");
    const char *said = json_string_value(json_object_get(weights, "strategy"));
    const json_int_t size = json_integer_value(group),
                     bits = json_integer_value(json_object_get(weights, "num_bits"));
    const char *strategy = said ? said : size > 0 ? "group" : size < 0 ? "channel" : "";
    if (value_is_listed("group|tensor_group", strategy) && size > 0)
        return (Coding){ bits, 1, size, true, true };
    if (strcmp(strategy, "block") == 0)
        return (Coding){ bits, 128, 128, true, true }; /* other block sizes cannot be read */
    return (Coding){ bits, strcmp(strategy, "channel") == 0, 0,
                     value_is_listed("channel|tensor", strategy), true };
}

Coding *quantized_codings(const char *folder, int *count)
{
    json_t *settings = settings_of(folder), *groups = json_object_get(settings, "config_groups"),
           *member;
    const json_t *group = json_object_get(settings, "group_size"),
                 *block = json_object_get(settings, "weight_block_size");
    Coding *all = xcalloc(json_object_size(groups) + 1, sizeof *all);
    const char *key;
    *count = settings ? 0 : -1;
    json_object_foreach(groups, key, member) all[(*count)++] =
        coding_of(json_object_get(member, "weights"));
    if (json_is_integer(group)) { /* GPTQ's group size; -1: all inputs */
        const json_int_t size = json_integer_value(group);
        all[(*count)++] =
            (Coding){ json_integer_value(json_object_get(settings, "bits")), 1, size > 0 ? size : 0,
                      true, json_is_false(json_object_get(settings, "desc_act")) };
    } else if (json_is_array(block))
        all[(*count)++] = (Coding){ 0, 128, 128, true, true };
    json_decref(settings);
    return all;
}

bool quantized_in_4_bits(const char *folder, bool *nested)
{
    json_t *config = file_try_json(folder, "config.json");
    const json_t *settings = json_object_get(config, "quantization_config");
    const bool found = is_4_bit(settings);
    if (found)
        *nested = json_is_true(json_object_get(settings, "bnb_4bit_use_double_quant"));
    json_decref(config);
    return found;
}
