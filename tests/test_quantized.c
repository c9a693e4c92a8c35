/* Folders with quantized weights, as written by their programs: unsupported ones are refused with
 * the name of their quantization, from settings or tensors. Settings: bitsandbytes 0.50, GPTQModel
 * 7.7, AutoAWQ 0.2, compressed-tensors 0.19, transformers 5.17. */
#include <string.h>

#include "model/checkpoint/weight_files.h"
#include "model/config/hf.h"
#include "model/config/quantized.h"
#include "tests/adapted.h"
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
      "with GPTQ, 8 bits, by its bits, which" },
    { "{\"quant_method\": \"gptq\", \"bits\": 4, \"sym\": false}",
      "with GPTQ, 4 bits, by its sym, which" },
    { "{\"quant_method\": \"gptq\", \"bits\": 4, \"sym\": true, \"checkpoint_format\": "
      "\"gptq_v2\"}",
      "with GPTQ, 4 bits, by its checkpoint_format, which" },
    { "{\"quant_method\": \"awq\", \"bits\": 4, \"version\": \"gemm\"}",
      "with AWQ, 4 bits, which" },
    { "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"weight_block_size\": [64, 64]}",
      "with FP8 with a scale per block or tensor, by its weight_block_size" },
    { COMPRESSED("marlin-24") GROUPS("\"num_bits\": 4, \"type\": \"int\""),
      "with compressed-tensors, marlin-24, by its format, which" },
    { COMPRESSED("nvfp4-pack-quantized") GROUPS(""),
      "with compressed-tensors, nvfp4-pack-quantized, by its format, which" },
    { COMPRESSED("pack-quantized") GROUPS("\"num_bits\": 2, \"type\": \"int\""),
      "by its config_groups.*.weights.num_bits, which" },
    { COMPRESSED("pack-quantized")
          GROUPS("\"num_bits\": 4, \"type\": \"int\", \"symmetric\": false"),
      "by its config_groups.*.weights.symmetric, which" },
    { COMPRESSED("float-quantized")
          GROUPS("\"num_bits\": 8, \"type\": \"float\", \"block_structure\": [128, 64]"),
      "by its config_groups.*.weights.block_structure, which" },
    { COMPRESSED("int-quantized") "\"sparsity_config\": {\"format\": "
                                  "\"sparse-24-bitmask\"}, " GROUPS(
                                      "\"num_bits\": 8, \"type\": \"int\""),
      "by its sparsity_config.format, which" },
    { "{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}",
      "with NVIDIA Model Optimizer, NVFP4, which" },
    { "{\"quant_method\": \"mxfp4\"}", "with MXFP4" },
    { "{\"quant_method\": \"of tomorrow\"}", "with of tomorrow, which" },
    { "true", "quantization_config: expected an object" },
};

/* As programs write them; tensors must agree. */
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
};

static const struct {
    const char *file, *text, *words;
} by_file[] = {
    { "quantize_config.json", "{\"bits\": 8, \"group_size\": 128, \"desc_act\": false}",
      "with GPTQ, 8 bits, by its bits, which" },
    { "quant_config.json", "{\"w_bit\": 4, \"q_group_size\": 128}", "with AWQ, 4 bits, which" },
    { "hf_quant_config.json",
      "{\"producer\": {\"name\": \"modelopt\"}, \"quantization\": {\"quant_algo\": \"FP8\"}}",
      "with NVIDIA Model Optimizer, FP8, which" },
};

static void test_settings(void **state)
{
    (void)state;
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
            DIES(by_config[i].words, config_read_hf(&m, base));
            if (i + 1 < sizeof by_config / sizeof by_config[0])
                DIES(LOAD, config_read_hf(&m, base));
        }
        assert_int_equal(json_dump_file(config, path, 0), 0);
        json_decref(config);
    }
    for (size_t i = 0; i < sizeof by_file / sizeof by_file[0]; i++) {
        const char *file = lasting(text("%s/%s", base, by_file[i].file));
        write_text(file, by_file[i].text);
        DIES(by_file[i].words, config_read_hf(&m, base));
        remove(file);
    }
    for (size_t i = 0; i < sizeof read_by_config / sizeof read_by_config[0]; i++) {
        json_t *config = json_load_file(path, 0, NULL);
        json_object_set_new(config, "quantization_config", json_loads(read_by_config[i], 0, NULL));
        assert_int_equal(json_dump_file(config, path, 0), 0);
        json_decref(config);
        config_read_hf(&m, base);
    }
    config_read_hf(&m, base);
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
    { "mlp.up_proj.weight_scale_2", "F32", "NVFP4" },
    { "mlp.up_proj.input_scale", "F32", "FP8 with scales" },
};

/* The model of `base` with this tensor in place of one of the same name; its config.json has no
 * quantization. */
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

static void test_tensors(void **state)
{
    (void)state;
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

int main(void)
{
    device_init(0);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_settings),
                                        cmocka_unit_test(test_tensors) };
    return cmocka_run_group_tests_name("quantized", tests, make_root, remove_root);
}
