/* Folders with quantized weights, as their programs write them. Unsupported folders are refused;
 * the message names their quantization, from settings or tensors. Settings: bitsandbytes 0.50,
 * GPTQModel 7.7, AutoAWQ 0.2, compressed-tensors 0.19, transformers 5.17. */
#include <string.h>

#include "kernels/runtime/text.h"
#include "model/checkpoint/weight_files.h"
#include "model/config/export_options.h"
#include "model/formats/hf.h"
#include "model/formats/quantized.h"
#include "tests/test.h"
#include "tests/adapted.h"
#include "tests/coded.h"
#include "tests/exported.h"

#define LOAD "load the 16-bit folder from which they were quantized"

static void write_text(const char *path, const char *words)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(words, f);
    assert_int_equal(fclose(f), 0);
}

#define GROUPS(weights) \
    "\"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], \"weights\": {" weights "}}}}"
#define COMPRESSED(format) "{\"quant_method\": \"compressed-tensors\", \"format\": \"" format "\", "

static const struct {
    const char *settings, *words;
} by_config[] = {
    { "{\"quant_method\": \"gptq\", \"bits\": 8, \"group_size\": 128, \"sym\": true}",
      "with GPTQ, 8 bits (key bits), which" },
    { "{\"quant_method\": \"gptq\", \"bits\": 4, \"sym\": false}",
      "with GPTQ, 4 bits (key sym), which" },
    { "{\"quant_method\": \"gptq\", \"bits\": 4, \"sym\": true, \"checkpoint_format\": "
      "\"gptq_v2\"}",
      "with GPTQ, 4 bits (key checkpoint_format), which" },
    { "{\"quant_method\": \"awq\", \"bits\": 4, \"version\": \"gemm\"}",
      "with AWQ, 4 bits, which" },
    { "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"weight_block_size\": [64, 64]}",
      "with FP8 with a scale per block or tensor (key weight_block_size)" },
    { COMPRESSED("marlin-24") GROUPS("\"num_bits\": 4, \"type\": \"int\""),
      "with compressed-tensors, marlin-24 (key format), which" },
    { COMPRESSED("nvfp4-pack-quantized") GROUPS(""),
      "with compressed-tensors, nvfp4-pack-quantized (key format), which" },
    { COMPRESSED("pack-quantized") GROUPS("\"num_bits\": 2, \"type\": \"int\""),
      "(key config_groups.*.weights.num_bits), which" },
    { COMPRESSED("pack-quantized")
          GROUPS("\"num_bits\": 4, \"type\": \"int\", \"symmetric\": false"),
      "(key config_groups.*.weights.symmetric), which" },
    { COMPRESSED("mixed-precision") "\"config_groups\": {\"group_0\": {\"format\": "
                                    "\"nvfp4-pack-quantized\"}}}",
      "with compressed-tensors, mixed-precision (key config_groups.*.format), which" },
    { COMPRESSED("float-quantized")
          GROUPS("\"num_bits\": 8, \"type\": \"float\", \"block_structure\": [128, 64]"),
      "(key config_groups.*.weights.block_structure), which" },
    { COMPRESSED("int-quantized") "\"sparsity_config\": {\"format\": "
                                  "\"sparse-24-bitmask\"}, " GROUPS(
                                      "\"num_bits\": 8, \"type\": \"int\""),
      "(key sparsity_config.format), which" },
    { "{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}",
      "with NVIDIA Model Optimizer, NVFP4, which" },
    { "{\"quant_method\": \"mxfp4\"}", "with MXFP4" },
    { "{\"quant_method\": \"of tomorrow\"}", "with of tomorrow, which" },
    { "true", "quantization_config: expected an object" },
};

/* Settings as programs write them; the tensors must agree. */
static const char *const read_by_config[] = {
    "{\"quant_method\": \"bitsandbytes\", \"load_in_8bit\": true, \"load_in_4bit\": false, "
    "\"llm_int8_threshold\": 6.0}",
    "{\"load_in_8bit\": true}",
    "{\"load_in_4bit\": true}",
    "{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 128, \"desc_act\": true, \"sym\": "
    "true, "
    "\"checkpoint_format\": \"gptq\"}",
    "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"weight_block_size\": [128, 128], "
    "\"activation_scheme\": \"dynamic\"}",
    COMPRESSED("float-quantized") "\"kv_cache_scheme\": null, \"sparsity_config\": {}, "
                                  "\"transform_config\": {}, " GROUPS(
                                      "\"num_bits\": 8, \"type\": \"float\", \"strategy\": "
                                      "\"block\", \"symmetric\": true, \"dynamic\": false, "
                                      "\"block_structure\": \"128x128\", \"actorder\": null"),
    COMPRESSED("pack-quantized") GROUPS("\"num_bits\": 4, \"type\": \"int\", \"group_size\": 128"),
    COMPRESSED("mixed-precision") "\"config_groups\": {\"group_0\": {\"format\": "
                                  "\"float-quantized\", \"weights\": "
                                  "{\"num_bits\": 8, \"type\": \"float\"}}, \"group_1\": "
                                  "{\"format\": \"pack-quantized\", \"weights\": "
                                  "{\"num_bits\": 4, \"type\": \"int\"}}}}",
};

static const struct {
    const char *file, *text, *words;
} by_file[] = {
    { "quantize_config.json", "{\"bits\": 8, \"group_size\": 128, \"desc_act\": false}",
      "with GPTQ, 8 bits (key bits), which" },
    { "quant_config.json", "{\"w_bit\": 4, \"q_group_size\": 128}", "with AWQ, 4 bits, which" },
    { "hf_quant_config.json",
      "{\"producer\": {\"name\": \"modelopt\"}, \"quantization\": {\"quant_algo\": \"FP8\"}}",
      "with NVIDIA Model Optimizer, FP8, which" },
};

TEST(test_settings)
{
    ModelConfig m = { 0 };
    const char *base = save_base(LLAMA), *path = lasting(text("%s/config.json", base));
    for (size_t i = 0; i < sizeof by_config / sizeof by_config[0]; i++) {
        json_t *config = json_load_file(path, 0, NULL);
        /* compressed-tensors wrote compression_config */
        for (int old = 0; old < 2; old++) {
            const char *key = old && strstr(by_config[i].settings, "compressed")
                                  ? "compression_config"
                                  : "quantization_config";
            json_t *changed = json_copy(config);
            json_object_set_new(changed, key,
                                json_loads(by_config[i].settings, JSON_DECODE_ANY, NULL));
            assert_int_equal(json_dump_file(changed, path, 0), 0);
            json_decref(changed);
            DIES(by_config[i].words, hf_read(&m, base));
            if (i + 1 < sizeof by_config / sizeof by_config[0])
                DIES(LOAD, hf_read(&m, base));
        }
        assert_int_equal(json_dump_file(config, path, 0), 0);
        json_decref(config);
    }
    for (size_t i = 0; i < sizeof by_file / sizeof by_file[0]; i++) {
        const char *file = lasting(text("%s/%s", base, by_file[i].file));
        write_text(file, by_file[i].text);
        DIES(by_file[i].words, hf_read(&m, base));
        remove(file);
    }
    for (size_t i = 0; i < sizeof read_by_config / sizeof read_by_config[0]; i++) {
        json_t *config = json_load_file(path, 0, NULL);
        json_object_set_new(config, "quantization_config", json_loads(read_by_config[i], 0, NULL));
        assert_int_equal(json_dump_file(config, path, 0), 0);
        json_decref(config);
        hf_read(&m, base);
    }
    hf_read(&m, base);
    assert_int_equal(m.n_layers, architecture(LLAMA).n_layers);
    release();
}

static const struct {
    const char *name, *dtype, *words;
} by_tensor[] = {
    { "mlp.up_proj.SCB", "F32", "LLM.int8() of bitsandbytes" },
    { "mlp.up_proj.weight", "I8", "INT8" },
    { "mlp.up_proj.weight_scale", "BF16", "FP8 or INT8 with scales" },
    { "mlp.up_proj.weight", "F8_E4M3", "FP8" },
    { "mlp.up_proj.weight_scale_inv", "F32", "FP8 with a scale per block" },
    { "mlp.up_proj.weight_packed", "I32", "compressed-tensors, packed" },
    { "mlp.up_proj.weight_shape", "I64", "compressed-tensors" },
    { "mlp.up_proj.qweight", "I32", "GPTQ or AWQ" },
    { "mlp.up_proj.qzeros", "I32", "GPTQ or AWQ" },
    { "mlp.up_proj.scales", "F16", "GPTQ or AWQ" },
    { "mlp.up_proj.g_idx", "I32", "GPTQ" },
    { "mlp.up_proj.weight_g_idx", "I32", "the actorder of compressed-tensors" },
    { "mlp.up_proj.weight_zero_point", "I32", "zero points of compressed-tensors" },
    { "self_attn.k_scale", "F32", "scales of keys and values" },
    { "mlp.up_proj.weight_scale_2", "F32", "NVFP4" },
    { "mlp.up_proj.input_scale", "F32", "FP8 with scales" },
};

/* Writes the model of `base` with this tensor in place of the tensor of the same name. The folder's
 * config.json has no quantization. */
static const char *with_tensor(const char *base, const char *name, const char *dtype)
{
    static const size_t shape[] = { 8, 8 };
    const char *folder = lasting(text("%s/with", root));
    shell(text("rm -rf %s && mkdir %s && cp %s/config.json %s", folder, folder, base, folder));
    SafeFile *from = safetensors_open(text("%s/model.safetensors", base));
    SafeFile *to = safetensors_new(text("%s/model.safetensors", folder));
    for (int i = 0; i < from->count; i++)
        if (strcmp(from->tensor[i].name, name) != 0)
            safetensors_add(to, from->tensor[i].name, from->tensor[i].dtype, from->tensor[i].dims,
                            from->tensor[i].shape);
    safetensors_add(to, name, dtype, 2, shape);
    safetensors_lay_out(to);
    safetensors_create(to);
    safetensors_close(from);
    safetensors_close(to);
    return folder;
}

TEST(test_tensors)
{
    needs_fork();
    const char *base = save_base(LLAMA);
    Run r;
    for (size_t i = 0; i < sizeof by_tensor / sizeof by_tensor[0]; i++) {
        const char *name = lasting(text("model.layers.1.%s", by_tensor[i].name));
        const char *folder = with_tensor(base, name, by_tensor[i].dtype);
        open_adapted(&r, LLAMA, folder, all_modules, BASE_AS_FROZEN, "bf16");
        const char *said =
            lasting(text("tensor %s is stored as %s: the weights are quantized with %s", name,
                         by_tensor[i].dtype, by_tensor[i].words));
        DIES(said, load(&r, folder));
        DIES(said, export_folder(folder, NULL, text("%s/out", root), "BF16", 1 << 20));
        close_run(&r);
    }
    release();
}

/* ---- settings and tensors that do not fit ---------------------------------------------------- */

/* Returns the codings of a folder with this quantization_config, or with this
 * quantize_config.json. */
static void expect_codings(const char *settings, bool in_config, int expected,
                           const Coding *codings)
{
    int count;
    write_text(text("%s/config.json", root),
               in_config ? text("{\"quantization_config\": %s}", settings) : "{}");
    if (!in_config)
        write_text(text("%s/quantize_config.json", root), settings);
    Coding *found = quantized_codings(root, &count);
    assert_int_equal(count, expected);
    for (int i = 0; i < count; i++) {
        assert_int_equal(found[i].bits, codings[i].bits);
        assert_int_equal(found[i].high, codings[i].high);
        assert_int_equal(found[i].wide, codings[i].wide);
        assert_int_equal(found[i].has_scales, codings[i].has_scales);
        assert_int_equal(found[i].in_order, codings[i].in_order);
    }
    free(found);
    remove(text("%s/quantize_config.json", root));
}

TEST(test_said)
{
    static const struct {
        const char *weights;
        Coding coding;
    } weights[] = {
        { "\"num_bits\": 4, \"strategy\": \"group\", \"group_size\": 48",
          { 4, 1, 48, true, true } },
        { "\"num_bits\": 4, \"group_size\": 32", { 4, 1, 32, true, true } },
        { "\"num_bits\": 8, \"group_size\": -1", { 8, 1, 0, true, true } },
        { "\"num_bits\": 8, \"strategy\": \"channel\", \"group_size\": null",
          { 8, 1, 0, true, true } },
        { "\"num_bits\": 8, \"strategy\": \"tensor\"", { 8, 0, 0, true, true } },
        { "\"num_bits\": 8, \"strategy\": \"block\", \"block_structure\": [128, 128]",
          { 8, 128, 128, true, true } },
        { "\"num_bits\": 8", { 8, 0, 0, false, true } },
        { "", { 0, 0, 0, false, true } },
    };
    for (size_t i = 0; i < sizeof weights / sizeof weights[0]; i++)
        expect_codings(text("{" GROUPS("%s"), weights[i].weights), true, 1, &weights[i].coding);
    expect_codings("{\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}", true, 1,
                   &(Coding){ 0, 128, 128, true, true });
    expect_codings("{\"quant_method\": \"fp8\"}", true, 0, NULL);
    for (int i = 0; i < 2; i++) {
        expect_codings("{\"bits\": 4, \"group_size\": 64, \"desc_act\": false}", i, 1,
                       &(Coding){ 4, 1, 64, true, true });
        expect_codings("{\"bits\": 4, \"group_size\": -1, \"desc_act\": true}", i, 1,
                       &(Coding){ 4, 1, 0, true, false });
    }
    expect_codings("null", true, -1, NULL);
    release();
}

/* Writes the folder's model without the tensors whose names end with `end`. Unless `more` is NULL,
 * adds `more`, 8 x cols. */
static void leave_out(const char *folder, const char *end, const char *more, const char *dtype,
                      size_t cols)
{
    const size_t shape[] = { 8, cols };
    SafeFile *from = safetensors_open(text("%s/model.safetensors", folder));
    SafeFile *to = safetensors_new(text("%s/new.safetensors", folder));
    for (int i = 0; i < from->count; i++)
        if (!text_ends_with(from->tensor[i].name, end))
            safetensors_add(to, from->tensor[i].name, from->tensor[i].dtype, from->tensor[i].dims,
                            from->tensor[i].shape);
    if (more)
        safetensors_add(to, more, dtype, 2, shape);
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < to->count; i++) {
        const SafeTensor *t = safetensors_find(from, to->tensor[i].name);
        if (!t)
            continue;
        const size_t bytes = t->end - t->begin;
        char *data = xmalloc(bytes);
        safetensors_read(from, data, t, 0, bytes);
        assert_true(safetensors_write(to, &to->tensor[i], 0, data, bytes));
        free(data);
    }
    safetensors_close(from);
    safetensors_close(to);
    shell(text("mv %s/new.safetensors %s/model.safetensors", folder, folder));
}

static const char *exported_as(const char *source, const char *dtype, int layout, int group)
{
    const char *folder = lasting(text("%s/coded%d", root, num_folders++));
    ExportOptions o = export_options_of(source, NULL, folder, dtype);
    o.layout = layout;
    o.group = group;
    export_to(&o, CHECKPOINT_FILE_BYTES);
    return folder;
}

/* Both a load and an export of the folder must end with this message. */
static void expect_refused(const ModelConfig *m, const char *folder, const char *message)
{
    Run r;
    const Format f32 = { F32, 0 };
    open_run(&r, m, f32, f32, f32);
    DIES(message, load(&r, folder));
    DIES(message, export_folder(folder, NULL, text("%s/out", root), "F32", CHECKPOINT_FILE_BYTES));
    close_run(&r);
}

#define UP "model.layers.0.mlp.up_proj."

/* Folders that this program exported: with other settings, and without one tensor. */
TEST(test_misfits)
{
    needs_fork();
    static const struct {
        const char *dtype;
        int layout;
        const char *change, *end, *message;
    } cases[] = {
        { "int4", NOT_GIVEN, "s/\"group_size\": 64/\"group_size\": 96/", NULL,
          ".weight_scale is 256 x 2 of BF16, for model.layers.0.self_attn.q_proj.weight of 256 x "
          "128 in 4 bits. By the quantization_config "
          "of its folder this matrix has 4 bits and a scale for each 1 x 96 weights, and the "
          "size of a group must divide the length of a row" },
        { "int4", NOT_GIVEN, "s/\"group_size\": 64/\"group_size\": 32/", NULL,
          "a scale for each 1 x 32 weights" },
        { "int4", NOT_GIVEN, "s/\"num_bits\": 4/\"num_bits\": 8/", NULL,
          "this matrix has 8 bits and a scale for each 1 x 64" },
        { "int8", NOT_GIVEN, "s/\"channel\"/\"tensor\"/", NULL,
          "this matrix has 8 bits and a scale for each 256 x 128 weights" },
        { "fp8", NOT_GIVEN, "s/\"channel\"/\"block\"/", NULL,
          "this matrix has 8 bits and a scale for each 128 x 128 weights" },
        { "fp8", NOT_GIVEN, "", UP "weight_scale",
          "tensor " UP "weight of F8_E4M3 needs " UP "weight_scale or " UP
          "weight_scale_inv, which is not in that file: copy all files of the folder again" },
        { "fp8", AS_FP8, "", UP "weight_scale_inv",
          "tensor " UP "weight of F8_E4M3 needs " UP "weight_scale or " UP },
        { "fp8", AS_FP8, "", UP "weight",
          "tensor " UP "weight_scale_inv of F32 needs " UP "weight, which is not" },
        { "int8", AS_BITSANDBYTES, "", UP "SCB",
          "tensor " UP "weight of I8 needs " UP "weight_scale or " UP "SCB, which" },
        { "int4", NOT_GIVEN, "", UP "weight_scale", " needs " UP "weight_scale, which is not" },
        { "int4", NOT_GIVEN, "", UP "weight_packed", "needs " UP "weight_packed, which" },
        { "nf4", NOT_GIVEN, "", UP "weight.quant_state.bitsandbytes__nf4",
          "needs " UP "weight.quant_state.bitsandbytes__nf4 or " UP
          "weight.quant_state.bitsandbytes__fp4, which" },
    };
    const ModelConfig m = wide(QWEN3);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *dtype = cases[i].dtype;
        const char *folder = exported_as(save_wide(QWEN3), dtype, cases[i].layout,
                                         strcmp(dtype, "int4") == 0 ? 64 : NOT_GIVEN);
        if (cases[i].end)
            leave_out(folder, cases[i].end, NULL, NULL, 0);
        shell(text("cd %s && sed -i '%s' config.json", folder, cases[i].change));
        expect_refused(&m, folder, cases[i].message);
        release();
    }
}

/* A quantized head in a model with tied embeddings. */
TEST(test_tied_head)
{
    needs_fork();
    Run r;
    ModelConfig m = wide(QWEN3);
    const Format f32 = { F32, 0 };
    m.weight_tying = true;
    open_run(&r, &m, f32, f32, f32);
    store_init(&r.store, &r.config.model, 3);
    save(&r, 1);
    const char *folder = exported_as(lasting(step_folder(&r, 1)), "fp8", NOT_GIVEN, NOT_GIVEN);
    close_run(&r);
    leave_out(folder, "nothing", "lm_head.weight", "F8_E4M3", 8);
    leave_out(folder, "nothing", "lm_head.weight_scale", "BF16", 1);
    expect_refused(&m, folder, "belongs to a quantized head, but ");
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
