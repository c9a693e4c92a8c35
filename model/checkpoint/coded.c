#include "model/checkpoint/coded.h"

#include <float.h>

#include "kernels/nf4_map.h"
#include "kernels/runtime/error.h"

enum { BLOCK = 128, STATE_BYTES = 256 };

static const struct {
    ExportType dtype;
    ExportLayout layout;
    int block;
    ExportScales scales;
    CodedKind kind;
} choices[] = {
    { EXPORT_FP8, AS_COMPRESSED_TENSORS, NOT_GIVEN, SCALES_COMPUTED, CODED_FP8_ROWS },
    { EXPORT_FP8, AS_COMPRESSED_TENSORS, BLOCK, SCALES_COMPUTED, CODED_FP8_BLOCKS },
    { EXPORT_FP8, AS_COMPRESSED_TENSORS, NOT_GIVEN, SCALES_TRAINED, CODED_FP8_TENSOR },
    { EXPORT_FP8, AS_FP8, NOT_GIVEN, SCALES_COMPUTED, CODED_FP8_INVERSE },
    { EXPORT_FP8, AS_FP8, BLOCK, SCALES_COMPUTED, CODED_FP8_INVERSE },
    { EXPORT_INT8, AS_COMPRESSED_TENSORS, NOT_GIVEN, SCALES_COMPUTED, CODED_INT8 },
    { EXPORT_INT8, AS_BITSANDBYTES, NOT_GIVEN, SCALES_COMPUTED, CODED_INT8_LLM },
    { EXPORT_INT4, AS_COMPRESSED_TENSORS, NOT_GIVEN, SCALES_COMPUTED, CODED_INT4 },
    { EXPORT_NF4, AS_BITSANDBYTES, NOT_GIVEN, SCALES_COMPUTED, CODED_NF4 },
};
enum { NUM_CHOICES = sizeof choices / sizeof choices[0] };

bool coded_knows(ExportType dtype)
{
    return dtype > EXPORT_F32;
}

Coded coded_find(const ExportOptions *o)
{
    const bool grouped = o->group == NOT_GIVEN || o->dtype == EXPORT_INT4;
    if (!coded_knows(o->dtype) && o->layout == NOT_GIVEN && o->block == NOT_GIVEN &&
        o->group == NOT_GIVEN && o->scales == SCALES_COMPUTED)
        return (Coded){ 0 };
    for (int i = 0; i < NUM_CHOICES && grouped; i++)
        if (choices[i].dtype == o->dtype &&
            (o->layout == NOT_GIVEN || (int)choices[i].layout == o->layout) &&
            choices[i].block == o->block && choices[i].scales == o->scales)
            return (Coded){ choices[i].kind, o->group == NOT_GIVEN ? BLOCK : (size_t)o->group };
    die("--export: --dtype=%s%s%s%s%s%s cannot be combined; expected --dtype=fp8, optionally with "
        "one of --block=128, "
        "--scales=trained, --layout=fp8; --dtype=int8, optionally with --layout=bitsandbytes; "
        "--dtype=int4, optionally with "
        "--group=32, 64 or 128; or --dtype=nf4, bf16, f16 or f32",
        export_options_word("dtype", (int)o->dtype), o->layout == NOT_GIVEN ? "" : " and --layout=",
        o->layout == NOT_GIVEN ? "" : export_options_word("layout", o->layout),
        o->block == NOT_GIVEN ? "" : " and --block", o->group == NOT_GIVEN ? "" : " and --group",
        o->scales == SCALES_COMPUTED ? "" : " and --scales=trained");
}

const char *coded_name(Coded c)
{
    static const char *const names[] = {
        [CODED_FP8_ROWS] = "fp8 with a scale per row",
        [CODED_FP8_BLOCKS] = "fp8 with a scale per block",
        [CODED_FP8_TENSOR] = "fp8 with the trainer's scales",
        [CODED_FP8_INVERSE] = "fp8 with a scale per block",
        [CODED_INT8] = "int8 with a scale per row",
        [CODED_INT8_LLM] = "int8 as LLM.int8()",
        [CODED_INT4] = "int4 with a scale per group",
        [CODED_NF4] = "nf4",
    };
    return names[c.kind];
}

bool coded_refuses(Coded c, size_t rows, size_t cols)
{
    switch (c.kind) {
    case CODED_FP8_BLOCKS:
    case CODED_FP8_INVERSE: return rows % BLOCK || cols % BLOCK;
    case CODED_INT4: return cols % c.group;
    default: return false;
    }
}

const char *coded_instead(Coded c, size_t cols)
{
    return c.kind != CODED_INT4 ? "--dtype=fp8 without --block and --layout"
           : cols % 64 == 0     ? "--group=64"
           : cols % 32 == 0     ? "--group=32"
                                : "--dtype=int8";
}

float coded_most(Coded c)
{
    return c.kind == CODED_INT8_LLM ? 65504 : FLT_MAX;
}

/* ---- tensors --------------------------------------------------------------------------------- */

int coded_tensors(CodedTensor to[CODED_TENSORS], Coded c, size_t O, size_t I)
{
    const size_t wide = (I + BLOCK - 1) / BLOCK, high = (O + BLOCK - 1) / BLOCK,
                 absmaxes = (O * I + NF4_BLOCK - 1) / NF4_BLOCK;
    const CodedTensor codes = { ".weight", "F8_E4M3", 2, { O, I }, 1, 1 },
                      integers = { ".weight", "I8", 2, { O, I }, 1, 1 };
    const CodedTensor by_row = { ".weight_scale", "BF16", 2, { O, 1 }, I, 2 };
    switch (c.kind) {
    case CODED_FP8_ROWS: to[0] = codes, to[1] = by_row; return 2;
    case CODED_FP8_BLOCKS:
        to[0] = codes,
        to[1] = (CodedTensor){ ".weight_scale", "BF16", 2, { high, wide }, BLOCK * I, 2 * wide };
        return 2;
    case CODED_FP8_INVERSE:
        to[0] = codes,
        to[1] = (CodedTensor){ ".weight_scale_inv", "F32", 2, { high, wide }, BLOCK * I, 4 * wide };
        return 2;
    case CODED_FP8_TENSOR:
        to[0] = codes, to[1] = (CodedTensor){ ".weight_scale", "F32", 1, { 1 } };
        return 2;
    case CODED_INT8: to[0] = integers, to[1] = by_row; return 2;
    case CODED_INT8_LLM:
        to[0] = integers, to[1] = (CodedTensor){ ".SCB", "F32", 1, { O }, I, 4 };
        to[2] = (CodedTensor){ ".weight_format", "U8", 0 };
        return 3;
    case CODED_INT4:
        to[0] = (CodedTensor){ ".weight_packed", "I32", 2, { O, I / 8 }, 8, 4 };
        to[1] = (CodedTensor){ ".weight_scale", "BF16", 2, { O, I / c.group }, c.group, 2 };
        to[2] = (CodedTensor){ ".weight_shape", "I64", 1, { 2 } };
        return 3;
    case CODED_NF4:
        to[0] = (CodedTensor){ ".weight", "U8", 2, { (O * I + 1) / 2, 1 }, 2, 1 };
        to[1] = (CodedTensor){ ".weight.absmax", "U8", 1, { absmaxes }, NF4_BLOCK, 1 };
        to[2] =
            (CodedTensor){ ".weight.nested_absmax", "F32", 1, { nf4_groups(O, I) }, NF4_GROUP, 4 };
        to[3] = (CodedTensor){ ".weight.nested_quant_map", "F32", 1, { 256 } };
        to[4] = (CodedTensor){ ".weight.quant_map", "F32", 1, { 16 } };
        to[5] = (CodedTensor){ ".weight.quant_state.bitsandbytes__nf4", "U8", 1, { STATE_BYTES } };
        return 6;
    }
    return 0;
}

size_t coded_unit(Coded c, size_t cols)
{
    return c.kind == CODED_NF4                                         ? NF4_GROUP
           : c.kind == CODED_FP8_BLOCKS || c.kind == CODED_FP8_INVERSE ? BLOCK * cols
                                                                       : cols;
}

/* ---- config.json ----------------------------------------------------------------------------- */

/* compressed-tensors' list of modules that have no codes. With images it has regular expressions,
 * because programs differ in the prefixes of module names. */
static json_t *ignored(bool images, json_t *plain)
{
    json_t *list = images ? json_pack("[s,s,s]", "re:.*lm_head", "re:.*vision_tower.*",
                                      "re:.*multi_modal_projector.*")
                          : json_pack("[s]", "lm_head");
    json_array_extend(list, plain);
    return list;
}

/* Other libraries' list of modules that have no codes. A name in the list is the beginning of a
 * module's path; in transformers 5, the path begins at the first level of the class. */
static json_t *skipped(bool images, json_t *plain)
{
    json_t *list =
        images ? json_pack("[s,s,s,s,s]", "lm_head", "model.vision_tower",
                           "model.multi_modal_projector", "vision_tower", "multi_modal_projector")
               : json_pack("[s]", "lm_head");
    json_array_extend(list, plain);
    return list;
}

/* The settings of compressed-tensors: only keys that every version reads. */
static json_t *compressed_tensors(const char *format, json_t *weights, json_t *activations,
                                  bool images, json_t *plain)
{
    return json_pack("{s:s, s:s, s:s, s:o, s:{s:{s:[s], s:o, s:o}}}", "quant_method",
                     "compressed-tensors", "format", format, "quantization_status", "compressed",
                     "ignore", ignored(images, plain), "config_groups", "group_0", "targets",
                     "Linear", "weights", weights, "input_activations", activations);
}

static json_t *scheme(int bits, const char *type, bool dynamic, const char *strategy)
{
    return json_pack("{s:i, s:s, s:b, s:b, s:s}", "num_bits", bits, "type", type, "symmetric", 1,
                     "dynamic", dynamic, "strategy", strategy);
}

static json_t *with(json_t *scheme, const char *key, json_t *value)
{
    json_object_set_new(scheme, key, value);
    return scheme;
}

/* Settings of bitsandbytes. Without a list of modules, bitsandbytes skips only the head. */
static json_t *skipping(json_t *settings, bool images, json_t *plain)
{
    return images || json_array_size(plain) > 0
               ? with(settings, "llm_int8_skip_modules", skipped(images, plain))
               : settings;
}

json_t *coded_config(Coded c, bool images, json_t *plain)
{
    switch (c.kind) {
    case CODED_FP8_ROWS:
        return compressed_tensors("float-quantized", scheme(8, "float", false, "channel"),
                                  scheme(8, "float", true, "token"), images, plain);
    case CODED_FP8_TENSOR:
        return compressed_tensors("float-quantized", scheme(8, "float", false, "tensor"),
                                  scheme(8, "float", true, "token"), images, plain);
    case CODED_FP8_BLOCKS:
        return compressed_tensors(
            "float-quantized",
            with(scheme(8, "float", false, "block"), "block_structure",
                 json_pack("[i,i]", BLOCK, BLOCK)),
            with(scheme(8, "float", true, "group"), "group_size", json_integer(BLOCK)), images,
            plain);
    case CODED_FP8_INVERSE:
        return json_pack("{s:s, s:s, s:s, s:[i,i], s:o}", "quant_method", "fp8", "fmt", "e4m3",
                         "activation_scheme", "dynamic", "weight_block_size", BLOCK, BLOCK,
                         "modules_to_not_convert", skipped(images, plain));
    case CODED_INT8:
        return compressed_tensors("int-quantized", scheme(8, "int", false, "channel"),
                                  scheme(8, "int", true, "token"), images, plain);
    case CODED_INT4:
        return compressed_tensors(
            "pack-quantized",
            with(scheme(4, "int", false, "group"), "group_size", json_integer((json_int_t)c.group)),
            json_null(), images, plain);
    case CODED_INT8_LLM:
        return skipping(json_pack("{s:s, s:b, s:f}", "quant_method", "bitsandbytes", "load_in_8bit",
                                  1, "llm_int8_threshold", 6.0),
                        images, plain);
    case CODED_NF4:
        return skipping(json_pack("{s:s, s:b, s:s, s:b, s:s, s:s}", "quant_method", "bitsandbytes",
                                  "load_in_4bit", 1, "bnb_4bit_quant_type", "nf4",
                                  "bnb_4bit_use_double_quant", 1, "bnb_4bit_compute_dtype",
                                  "bfloat16", "bnb_4bit_quant_storage", "uint8"),
                        images, plain);
    }
    return NULL;
}
