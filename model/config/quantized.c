/* What tells that a folder's weights are quantized, as tables: settings that programs write, and tensors that they save. */
#include "model/config/quantized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/error.h"
#include "kernels/text.h"

#define LOAD_16_BIT "which is not read; load the 16-bit folder that they were quantized from"

/* Values of quant_method, and who is meant. Others are named as they are. */
static const struct { const char *method, *name; } methods[] = {
    { "gptq", "GPTQ" }, { "awq", "AWQ" }, { "aqlm", "AQLM" }, { "hqq", "HQQ" }, { "eetq", "EETQ" }, { "quip", "QuIP" },
    { "bitsandbytes", "bitsandbytes" }, { "fp8", "FP8 with a scale per block or tensor" }, { "fbgemm_fp8", "FP8 of FBGEMM" },
    { "mxfp4", "MXFP4" }, { "modelopt", "NVIDIA Model Optimizer" },
};

/* Ends of names that only quantized weights have next to them or in their place. */
static const struct { const char *end, *name; } tensors[] = {
    { ".SCB", "LLM.int8() of bitsandbytes" },           { ".weight_format", "LLM.int8() of bitsandbytes" },
    { ".weight_scale_inv", "FP8 with a scale per block" },      { ".weight_scale", "FP8 or INT8 with scales" },
    { ".weight_scale_2", "NVFP4" },                     { ".weight_zero_point", "compressed-tensors" },
    { ".weight_packed", "compressed-tensors, packed" }, { ".weight_shape", "compressed-tensors, packed" },
    { ".weight_g_idx", "compressed-tensors, packed" },  { ".weight_global_scale", "NVFP4" },
    { ".input_scale", "FP8 with scales" },              { ".activation_scale", "FP8 with scales" },
    { ".qweight", "GPTQ or AWQ" },                      { ".qzeros", "GPTQ or AWQ" },
    { ".scales", "GPTQ or AWQ" },                       { ".g_idx", "GPTQ" },
    { ".W_q", "HQQ" },                                  { ".codebooks", "AQLM" },
    { ".weight_scales", "EETQ" },                       { ".weight._data", "Quanto" },
    { ".weight._scale", "Quanto" },                     { "_blocks", "MXFP4" },
};

/* safetensors' types in which no weight is stored that is not quantized, with the name of the tensor's kind. */
static const struct { const char *dtype, *name; } types[] = {
    { "I8", "INT8" }, { "I32", "packed integers" }, { "F8_E4M3", "FP8" }, { "F8_E5M2", "FP8" },
    { "F8_E8M0", "FP8" }, { "F4", "FP4" },
};

/* What other programs write next to config.json, and the object in it. */
static const struct { const char *file, *object, *program; } others[] = {
    { "quantize_config.json", NULL, "GPTQ" }, { "quant_config.json", NULL, "AWQ" },
    { "hf_quant_config.json", "quantization", "NVIDIA Model Optimizer" },
};

static json_t *read_object(const char *folder, const char *name)
{
    char *path = xasprintf("%s/%s", folder, name);
    check_regular(path);
    json_t *object = json_load_file(path, 0, NULL);
    free(path);
    return object;
}

static bool is_4_bit(const json_t *settings)
{
    return json_is_true(json_object_get(settings, "load_in_4bit"));
}

/* ", 4 bits", ", float-quantized" and the like. */
static void print_details(FILE *f, const json_t *settings)
{
    static const char *const bits[] = { "bits", "w_bit", "nbits", "num_bits" };
    static const char *const words[] = { "format", "quant_algo", "quant_type" };
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++)
        if (json_is_integer(json_object_get(settings, bits[i])))
            fprintf(f, ", %lld bits", (long long)json_integer_value(json_object_get(settings, bits[i])));
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (json_is_string(json_object_get(settings, words[i])))
            fprintf(f, ", %.64s", json_string_value(json_object_get(settings, words[i])));
}

/* program: who wrote them, if they do not say. */
static _Noreturn void refuse(const char *folder, const char *file, const json_t *settings, const char *program)
{
    const char *method = json_string_value(json_object_get(settings, "quant_method"));
    const char *name = method ? method : program;
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        die("out of host memory");
    for (size_t i = 0; method && i < sizeof methods / sizeof methods[0]; i++)
        if (strcmp(methods[i].method, method) == 0)
            name = methods[i].name;
    fprintf(f, "%.64s", json_is_true(json_object_get(settings, "load_in_8bit")) ? "LLM.int8() of bitsandbytes, 8 bits" : name);
    print_details(f, settings);
    fclose(f);
    die("%s/%s: the weights are quantized with %s, " LOAD_16_BIT, folder, file, text);
}

void quantized_refuse(const json_t *config, const char *folder)
{
    static const char *const keys[] = { "quantization_config", "compression_config" };
    for (int i = 0; i < 2; i++) {
        const json_t *settings = json_object_get(config, keys[i]);
        const bool says = json_is_string(json_object_get(settings, "quant_method"));
        if (settings && !json_is_null(settings) && !json_is_object(settings))
            die("%s/config.json: %s: expected an object; take it out if the weights are not quantized", folder, keys[i]);
        if (is_4_bit(settings))
            return;
        if (says || json_is_true(json_object_get(settings, "load_in_8bit")) || (i == 1 && json_object_size(settings) > 0))
            refuse(folder, "config.json", settings, "compressed-tensors");
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        json_t *file = read_object(folder, others[i].file);
        const json_t *settings = others[i].object ? json_object_get(file, others[i].object) : file;
        if (json_object_size(settings) > 0)
            refuse(folder, others[i].file, settings, others[i].program);
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
        die("%s: tensor %s is stored as %s: the weights are quantized with %s, " LOAD_16_BIT, path, name, dtype, with);
}

bool quantized_in_4_bits(const char *folder, bool *nested)
{
    json_t *config = read_object(folder, "config.json");
    const json_t *settings = json_object_get(config, "quantization_config");
    const bool found = is_4_bit(settings);
    if (found)
        *nested = json_is_true(json_object_get(settings, "bnb_4bit_use_double_quant"));
    json_decref(config);
    return found;
}
