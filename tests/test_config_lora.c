/* Adapters in the configuration: every key and every refusal; folders of adapters from PEFT and
 * from this program as load_path; and the written adapter_config.json. */
#include <stddef.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/formats/adapter.h"
#include "tests/test.h"
#include "tests/try_config.h"

/* A model of 2 blocks with half as many key/value heads as query heads. */
#define BASE "{" TRY_LLAMA ", \"num_key_value_heads\": 2}"
/* The output of PEFT 0.21, shortened. `more` is at the end, so that its keys take precedence. */
#define PEFT(more) \
    "{\"alpha_pattern\": {}, \"auto_mapping\": null, \"bias\": \"none\", \"exclude_modules\": " \
    "null, " \
    "\"fan_in_fan_out\": false, \"inference_mode\": true, \"init_lora_weights\": true, " \
    "\"layers_to_transform\": null, " \
    "\"lora_bias\": false, \"modules_to_save\": null, \"peft_type\": \"LORA\", \"rank_pattern\": " \
    "{}, \"revision\": null, " \
    "\"task_type\": \"CAUSAL_LM\", \"use_dora\": false" more "}"
#define NUMBERS ", \"r\": 4, \"lora_alpha\": 8, \"lora_dropout\": 0.0"
#define TARGETS ", \"target_modules\": [\"v_proj\", \"q_proj\"]"
#define BESIDE ", \"base_model_name_or_path\": \"../base\""

static char base[128], adapter[128], load_base[160], load_adapter[160];

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    try_write(path, text);
}

static int begin(void **state)
{
    const int status = try_make_folder(state);
    snprintf(base, sizeof base, "%s/base", try_folder);
    snprintf(adapter, sizeof adapter, "%s/adapter", try_folder);
    snprintf(load_base, sizeof load_base, "--load_path=%s", base);
    snprintf(load_adapter, sizeof load_adapter, "--load_path=%s", adapter);
    mkdir(base, 0777);
    mkdir(adapter, 0777);
    write_file(base, "config.json", BASE);
    write_file(base, "model.safetensors", "");
    write_file(adapter, "adapter_model.safetensors", "");
    try_write(
        try_path,
        "data: {paths: a.npy}\nglobal_train_batch_size: 8\ndevice_train_microbatch_size: 2\n");
    return status;
}

/* Loads the file without a model section. text: also checks that the written form gives the same
 * configuration. */
static Config *load(const char *a, const char *b, const char *c, const char *d)
{
    char saved[sizeof try_path];
    Config *config = try_load(1, a, b, c, d);
    strcpy(saved, try_path);
    snprintf(try_path, sizeof try_path, "%s/again.yaml", try_folder);
    try_write(try_path, config->text);
    Config *again = try_load(1, NULL, NULL, NULL, NULL);
    const Lora *l = &config->model.lora, *m = &again->model.lora;
    assert_string_equal(config->text, again->text);
    assert_true(l->rank == m->rank && l->alpha == m->alpha && l->use_rslora == m->use_rslora &&
                l->base == m->base);
    assert_memory_equal(l->target, m->target, sizeof l->target);
    assert_true(l->base_path ? strcmp(l->base_path, m->base_path) == 0 : !m->base_path);
    assert_true(format_equal(config->recipe.frozen, again->recipe.frozen));
    config_free(again);
    strcpy(try_path, saved);
    return config;
}

/* `letters` name the matrices with an adapter: q k v o g u d. */
static void check_targets(const Lora *l, const char *letters)
{
    for (int k = 0; k < NUM_LORA_MODULES; k++)
        assert_int_equal(l->target[k], strchr(letters, "qkvogud"[k]) != NULL);
}

TEST(test_keys)
{
    Config *c = load(load_base, NULL, NULL, NULL);
    assert_true(c->model.lora.rank == 0 && c->model.lora.base == BASE_AS_FROZEN &&
                !c->model.lora.base_path);
    assert_true(lora_scale(&c->model.lora) == 0);
    assert_null(strstr(c->changes, "lora"));
    config_free(c);

    c = load(load_base, "--lora.rank=8", NULL, NULL);
    const Lora *l = &c->model.lora;
    assert_true(l->rank == 8 && l->alpha == 8 && !l->use_rslora && l->base == BASE_AS_FROZEN &&
                lora_scale(l) == 1);
    assert_string_equal(l->base_path, base);
    check_targets(l, "qkvogud");
    try_contains(c->text, "  target_modules:\n  - all-linear\n");
    try_contains(c->changes, "lora.rank=8  lora.alpha=8");
    assert_null(strstr(c->changes, "lora.base"));
    char *text = adapter_describe(c);
    assert_string_equal(text, "adapters: rank 8 on all linear layers, scale 1, base in bf16");
    free(text);
    config_free(c);

    c = load(load_base,
             "--lora={rank: 4, alpha: 12, use_rslora: true, target_modules: [v_proj, mlp.up_proj]}",
             "--lora.base=e4m3", NULL);
    l = &c->model.lora;
    assert_true(l->rank == 4 && l->alpha == 12 && l->use_rslora && l->base == BASE_E4M3 &&
                lora_scale(l) == 6);
    check_targets(l, "vu");
    text = adapter_describe(c);
    assert_string_equal(text, "adapters: rank 4 on v_proj, up_proj, scale 6, base in e4m3");
    free(text);
    config_free(c);

    c = load(load_base, "--lora.rank=1", "--lora.target_modules=down_proj", "--lora.base=nf4");
    assert_true(c->model.lora.base == BASE_NF4);
    check_targets(&c->model.lora, "d");
    config_free(c);
    static const char *const all[] = { "q_proj",    "k_proj",  "v_proj",   "o_proj",
                                       "gate_proj", "up_proj", "down_proj" };
    for (int k = 0; k < NUM_LORA_MODULES; k++) {
        assert_string_equal(adapter_module_name((LoraModule)k), all[k]);
        assert_int_equal(adapter_module(all[k]), k);
    }
}

/* bf16 is a format of frozen weights; it has no effect without adapters. */
TEST(test_base)
{
    Config *c = load(load_base, "--lora.rank=2", "--recipe=f32", NULL);
    assert_true(c->recipe.frozen.dtype == F32 && c->model.lora.base == BASE_AS_FROZEN);
    config_free(c);
    c = load(load_base, "--lora={rank: 2, base: bf16}", "--recipe=f32", NULL);
    assert_true(c->recipe.frozen.dtype == BF16 && c->model.lora.base == BASE_AS_FROZEN);
    config_free(c);
    c = load(load_base, "--lora={rank: 2, base: bf16}", "--recipe=f32", "--format.frozen=bf16");
    assert_int_equal(c->recipe.frozen.dtype, BF16);
    config_free(c);
    static const char *const bases[] = { "null", "bf16", "e4m3", "nf4" };
    for (int i = 0; i < 4; i++) { /* the same in training */
        char lora[64];
        snprintf(lora, sizeof lora, "--lora={rank: 2, base: %s}", bases[i]);
        c = load(load_base, lora, "--recipe=fp8", "--generate=prompts.jsonl");
        assert_int_equal(c->recipe.frozen.dtype, BF16);
        config_free(c);
    }
    c = load(load_base, "--lora.rank=2", "--generate=prompts.jsonl", "--format.frozen=f32");
    assert_int_equal(c->recipe.frozen.dtype, F32);
    config_free(c);
    c = try_load(1, load_base, "--lora={base: nf4, alpha: 3}", "--recipe=f32", NULL);
    assert_true(c->recipe.frozen.dtype == F32 && c->model.lora.base == BASE_AS_FROZEN &&
                c->model.lora.rank == 0);
    config_free(c);
    try_accepted(load_base, "--lora={base: nf4, base_path: x}",
                 "lora.base lora.rank lora.base_path");
    try_accepted(load_base, "--lora={use_rslora: true, target_modules: [q_proj]}",
                 "lora.use_rslora lora.rank lora.target_modules");
    try_accepted(load_base, "--lora={use_rslora: false, target_modules: all-linear}", "");
}

/* Adapters on a folder that bitsandbytes saved in 4 bits do not need lora.base. */
TEST(test_quantized)
{
    static const struct {
        const char *quantized, *given;
        BaseFormat base;
        bool nested;
    } list[] = {
        { "true", NULL, BASE_NF4 },
        { "false", NULL, BASE_AS_FROZEN },
        { "true", "--lora.base=null", BASE_NF4 },
        { "true", "--lora.base=e4m3", BASE_E4M3 },
        { "true", "--lora.base=bf16", BASE_AS_FROZEN },
        { "true, \"bnb_4bit_use_double_quant\": true", NULL, BASE_NF4, true },
        { "true, \"bnb_4bit_use_double_quant\": false", "--lora.base=nf4", BASE_NF4 },
        { "false", "--lora.base=nf4", BASE_NF4, true },
    };
    write_file(adapter, "adapter_config.json", PEFT(NUMBERS TARGETS BESIDE));
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char text[1024];
        snprintf(text, sizeof text,
                 "{" TRY_LLAMA
                 ", \"num_key_value_heads\": 2, \"quantization_config\": {\"load_in_4bit\": %s}}",
                 list[i].quantized);
        write_file(base, "config.json", text);
        for (int is_new = 0; is_new < 2; is_new++) {
            Config *c = load(is_new ? load_base : load_adapter,
                             is_new ? "--lora.rank=2" : "--recipe=bf16", list[i].given, NULL);
            assert_int_equal(c->model.lora.base, list[i].base);
            assert_int_equal(c->model.lora.plain_nf4, list[i].base == BASE_NF4 && !list[i].nested);
            config_free(c);
        }
    }
    write_file(base, "config.json", BASE);
}

TEST(test_refused)
{
    static const struct {
        const char *argument, *names;
    } list[] = {
        { "--lora.rank=0", "lora.rank 1 2147483647 0" },
        { "--lora={rank: 2, alpha: 0}", "lora.alpha 0 rank 2" },
        { "--lora={rank: 2, base: int8}", "lora.base bf16|e4m3|nf4 int8 rank 2" },
        { "--lora={rank: 2, target_modules: [lm_head]}",
          "lora.target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head" },
        { "--lora={rank: 2, target_modules: []}", "lora.target_modules rank 2" },
        { "--lora={rank: 2, dropout: 0.1}", "lora.dropout 0.1 0|0.0|null rank 2" },
        { "--lora={rank: 2, lora_dropout: 0.05}", "lora.dropout 0.05 rank 2" },
        { "--lora={rank: 2, use_dora: true}", "lora.use_dora true false|null rank 2" },
        { "--lora={rank: 2, bias: all}", "lora.bias all none|null rank 2" },
        { "--lora={rank: 2, modules_to_save: [lm_head]}", "lora.modules_to_save rank 2 lm_head" },
        { "--lora.rank=65", "lora.rank 65 64 q_proj" },
        { "--lora={rank: 33, target_modules: [q_proj, k_proj]}",
          "lora.rank 33 32 k_proj 64 target_modules q_proj" },
        { "--lora={rank: 2, base_path: /elsewhere}",
          "load_path --load_path=/elsewhere lora rank 2 base_path" },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        try_refused(load_base, list[i].argument, list[i].names);
    }
    config_free(load(load_base, "--lora={rank: 2, lora_dropout: 0, use_dora: false, bias: none}",
                     "--lora.modules_to_save=null", NULL));
}

/* Settings that contradict adapters, or leave adapters without a base. */
TEST(test_together)
{
    char message[4096], both[256], saved[sizeof try_path];
    snprintf(
        both, sizeof both,
        "{load_path: %s, trainable: [model.norm.weight], lora: {rank: 2}, data: {paths: a.npy}}",
        base);
    strcpy(saved, try_path);
    snprintf(try_path, sizeof try_path, "%s/both.yaml", try_folder);
    try_write(try_path, both);
    try_refused(NULL, NULL, "lora.rank 2 --trainable=[]");
    snprintf(both, sizeof both,
             "{load_path: %s, recipe: f32, format: {frozen: f32}, lora: {rank: 2, base: bf16}, "
             "data: {paths: a.npy}}",
             base);
    try_write(try_path, both);
    try_refused(NULL, NULL, "lora.base bf16 format.frozen f32");
    try_write(try_path, try_complete);
    try_accepted("--lora.rank=2", NULL, "load_path");
    try_refused("--lora.rank=2", "--fp8.down_scales=channel",
                "fp8.down_scales channel lora.rank 2 --fp8.down_scales=tensor");
    try_accepted("--lora.rank=2", "--dry_run", "");
    try_accepted("--lora.rank=2", "--optimizer.learning_rate=2e-5",
                 "2e-05 optimizer.learning_rate 2e-5");
    try_write_changed(NULL, "parallelism: {tensor: 2}");
    assert_false(
        try_printed(message, sizeof message, 2, 2, "--lora={rank: 2, base: nf4}", "--recipe=bf16"));
    try_names(message, "parallelism.tensor 2 nf4 lora.base 64 out 32 --lora.base=e4m3");
    assert_true(try_printed(message, sizeof message, 2, 2, "--lora={rank: 2, base: e4m3}",
                            "--recipe=bf16"));
    strcpy(try_path, saved);
}

TEST(test_peft_folders)
{
#define BLOCK0 "\"model.layers.0.self_attn.q_proj\", \"layers.0.mlp.up_proj\""
#define BLOCK1 "\"1.self_attn.q_proj\", \"model.layers.1.mlp.up_proj\""
    static const struct {
        const char *json, *targets;
        double scale;
    } list[] = {
        { PEFT(NUMBERS TARGETS BESIDE), "qv", 2 },
        { PEFT(NUMBERS ", \"use_rslora\": true, \"target_modules\": \"all-linear\"" BESIDE),
          "qkvogud", 4 },
        { PEFT(NUMBERS ", \"use_rslora\": null, \"target_modules\": [" BLOCK0 ", " BLOCK1
                       ", \"self_attn.k_proj\"]" BESIDE),
          "qku", 2 },
        { PEFT(", \"r\": 2, \"lora_alpha\": 3, \"use_rslora\": false" TARGETS BESIDE), "qv", 1.5 },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        write_file(adapter, "adapter_config.json", list[i].json);
        Config *c = load(load_adapter, NULL, NULL, NULL);
        assert_true(fabs(lora_scale(&c->model.lora) - list[i].scale) < 1e-15);
        check_targets(&c->model.lora, list[i].targets);
        assert_true(c->model.d_model == 64 && c->model.n_layers == 2 &&
                    c->model.lora.base == BASE_AS_FROZEN);
        try_contains(c->model.lora.base_path, "/adapter/../base");
        try_contains(c->changes, "lora.rank=");
        config_free(c);
    }
    write_file(adapter, "adapter_config.json",
               PEFT(", \"r\": 4, \"lora_alpha\": 8, \"lora_dropout\": 0.1" TARGETS BESIDE));
    try_accepted(load_adapter, NULL, "lora_dropout 0.1");
}

/* The base is elsewhere. If it has the name of a model on the Hub, or no name, its path must be
 * given. */
TEST(test_where_the_base_is)
{
    char other[160], missing[160];
    snprintf(other, sizeof other, "--lora.base_path=%s", base);
    write_file(adapter, "adapter_config.json",
               PEFT(NUMBERS TARGETS ", \"base_model_name_or_path\": \"meta-llama/Llama-2-7b-hf\""));
    Config *c =
        load(load_adapter, other,
             "--lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj], base: nf4}", NULL);
    assert_string_equal(c->model.lora.base_path, base);
    assert_int_equal(c->model.lora.base, BASE_NF4);
    config_free(c);
    try_refused(
        load_adapter, NULL,
        "meta-llama/Llama-2-7b-hf --local-dir Llama-2-7b-hf --lora.base_path=Llama-2-7b-hf");
    snprintf(missing, sizeof missing, "--lora.base_path=%s", adapter);
    try_refused(load_adapter, missing, "lora.base_path");
    try_refused(load_adapter, "--lora.base_path=tests",
                "--lora.base_path=tests lora.base_path config.json");
    write_file(adapter, "adapter_config.json",
               PEFT(NUMBERS TARGETS ", \"base_model_name_or_path\": null"));
    try_refused(load_adapter, NULL, "base_model_name_or_path --lora.base_path=");
    write_file(adapter, "adapter_config.json",
               PEFT(NUMBERS TARGETS ", \"base_model_name_or_path\": \"/no/such\""));
    try_refused(load_adapter, NULL, "base_model_name_or_path /no/such --lora.base_path=FOLDER");
}

#define ALSO(key, value) "{\"peft_type\": \"LORA\", \"" key "\": " value NUMBERS TARGETS BESIDE "}"

TEST(test_peft_refused)
{
    static const struct {
        const char *json, *names;
    } list[] = {
        { "{", ":1" },
        { "{\"r\": 4}", "peft_type LORA" },
        { "{\"peft_type\": \"IA3\"}", "peft_type LORA IA3" },
        { "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": 3}",
          "base_model_name_or_path 3" },
        { PEFT(TARGETS BESIDE ", \"lora_alpha\": 8"), "1 2147483647" },
        { PEFT(TARGETS BESIDE ", \"r\": 1.5, \"lora_alpha\": 8"), "1 2147483647 1.5" },
        { PEFT(TARGETS BESIDE ", \"r\": 4"), "lora_alpha 0" },
        { PEFT(TARGETS BESIDE NUMBERS ", \"use_rslora\": 1"), "use_rslora 1" },
        { PEFT(TARGETS BESIDE ", \"r\": 4, \"lora_alpha\": 8, \"lora_dropout\": \"a\""),
          "lora_dropout" },
        { PEFT(BESIDE NUMBERS), "target_modules q_proj" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": []"), "target_modules" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": \".*proj\""),
          "target_modules .*proj adapter_model.safetensors" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"q_proj\", \"embed_tokens\"]"),
          "embed_tokens" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"_proj\"]"), "_proj" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"\"]"), "target_modules q_proj" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"visual.layers.0.mlp.up_proj\"]"),
          "visual.layers.0.mlp.up_proj" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"model.layers.2.mlp.up_proj\"]"),
          "model.layers.2.mlp.up_proj" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"model.layers.1.mlp.up_proj\"]"),
          "target_modules up_proj 1 2" },
        { PEFT(BESIDE NUMBERS ", \"target_modules\": [\"all-linear\"]"),
          "target_modules all-linear" },
        { ALSO("use_dora", "true"), "use_dora" },
        { ALSO("bias", "\"lora_only\""), "bias none lora_only" },
        { ALSO("modules_to_save", "[\"lm_head\"]"), "modules_to_save" },
        { ALSO("rank_pattern", "{\"q_proj\": 8}"), "rank_pattern" },
        { ALSO("alpha_pattern", "{\"q_proj\": 8}"), "alpha_pattern" },
        { ALSO("fan_in_fan_out", "true"), "fan_in_fan_out" },
        { ALSO("layers_to_transform", "0"), "layers_to_transform" },
        { ALSO("lora_bias", "true"), "lora_bias" },
        { ALSO("init_lora_weights", "\"pissa\""), "init_lora_weights" },
    };
    char message[4096], expected[256];
    snprintf(expected, sizeof expected, "error: %s/adapter_config.json:", adapter);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        write_file(adapter, "adapter_config.json", list[i].json);
        if (try_printed(message, sizeof message, 2, 1, load_adapter, NULL))
            fail_msg("%s was accepted", list[i].json);
        try_names(message, list[i].names);
        try_contains(message, expected);
    }
    write_file(adapter, "adapter_config.json",
               PEFT(", \"r\": 40, \"lora_alpha\": 8, \"target_modules\": [\"v_proj\"]" BESIDE));
    assert_false(try_printed(message, sizeof message, 2, 1, load_adapter, NULL));
    try_contains(message, expected);
    try_names(message, "lora.rank 40 32 v_proj 64 --export");
}

/* Next to a folder of adapters, settings may only repeat the folder's values. The folder must be
 * complete. */
TEST(test_contradicted)
{
    char command[256];
    write_file(adapter, "adapter_config.json", PEFT(NUMBERS TARGETS BESIDE));
    static const char *const others[] = { "rank=8", "alpha=4", "use_rslora=true",
                                          "target_modules=[q_proj]" };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        char argument[64], names[320];
        snprintf(argument, sizeof argument, "--lora.%s", others[i]);
        snprintf(names, sizeof names, "%s lora.%.*s %s", argument, (int)strcspn(others[i], "="),
                 others[i], adapter);
        try_refused(load_adapter, argument, names);
    }
    snprintf(command, sizeof command, "cd %s && mv adapter_model.safetensors adapter_model.bin",
             adapter);
    assert_int_equal(system(command), 0);
    try_refused(load_adapter, NULL, "PyTorch");
    snprintf(command, sizeof command, "cd %s && rm adapter_model.bin", adapter);
    assert_int_equal(system(command), 0);
    try_refused(load_adapter, NULL, "adapter_config.json adapter_model.safetensors");
    write_file(adapter, "adapter_model.safetensors", "");
}

static char saves[192], step[192], load_step[224];

/* Saves adapters of rank 4 as the checkpoint step5. */
static void save_step(void)
{
    Config *c =
        load(load_base, "--lora={rank: 4, alpha: 6, target_modules: [o_proj, up_proj], base: nf4}",
             "--model.max_sequence_length=24", NULL);
    char *text = adapter_config_text(c), command[512];
    snprintf(saves, sizeof saves, "--save_folder=%s/run", try_folder);
    snprintf(step, sizeof step, "%s/run/step5", try_folder);
    snprintf(load_step, sizeof load_step, "--load_path=%s/run/latest", try_folder);
    snprintf(command, sizeof command, "mkdir -p %s && ln -s step5 %s/run/latest", step, try_folder);
    assert_int_equal(system(command), 0);
    write_file(step, "adapter_config.json", text);
    write_file(step, "adapter_model.safetensors", "");
    write_file(step, "config.yaml", c->text);
    write_file(step, "trainer.json",
               "{\"format_version\": 1, \"files\": {\"adapter_model.safetensors\": 0}}");
    free(text);
    config_free(c);
}

/* Adapters that a run saved have the settings of their training, and a resume needs no other
 * settings. */
TEST(test_ours)
{
    save_step();
    char path[256];
    snprintf(path, sizeof path, "%s/adapter_config.json", step);
    json_t *json = json_load_file(path, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(json, "r")), 4);
    assert_true(json_is_integer(json_object_get(json, "lora_alpha")));
    assert_int_equal(json_array_size(json_object_get(json, "target_modules")), 2);
    assert_string_equal(json_string_value(json_object_get(json, "base_model_name_or_path")), base);
    assert_null(json_object_get(json, "modules_to_save"));

    const struct {
        const char *load, *more, *base;
    } ways[] = {
        /* the last: the base was moved; load_path has its new
         *                                                                 place */
        { load_step, NULL, base },
        { load_step, "--lora.base=e4m3", base },
        { load_base, "--try_load_latest_save", base },
        { load_base, "--try_load_latest_save", "/no/such" },
    };
    for (int i = 0; i < 4; i++) {
        json_object_set_new(json, "base_model_name_or_path", json_string(ways[i].base));
        assert_int_equal(json_dump_file(json, path, 0), 0);
        Config *c = load(ways[i].load, ways[i].more, saves, NULL);
        const Lora *l = &c->model.lora;
        assert_true(l->rank == 4 && l->alpha == 6 && l->base == (i == 1 ? BASE_E4M3 : BASE_NF4));
        assert_string_equal(l->base_path, base);
        check_targets(l, "ou");
        assert_int_equal(c->model.max_sequence_length, 24);
        config_free(c);
    }
    json_decref(json);
    char load_run[192], beside_run[192];
    snprintf(load_run, sizeof load_run, "--load_path=%s/run", try_folder);
    snprintf(beside_run, sizeof beside_run, "--lora.base_path=%s/run", try_folder);
    try_refused(load_run, NULL, "/run save_folder --load_path=");
    try_refused(load_adapter, beside_run, "/run save_folder --lora.base_path=");
}

/* A run that trains the whole model cannot continue with adapters. */
TEST(test_other_run)
{
    char command[512], saved[sizeof try_path];
    snprintf(command, sizeof command, "cd %s && rm adapter_config.json", step);
    assert_int_equal(system(command), 0);
    write_file(step, "config.json", BASE);
    strcpy(saved, try_path);
    snprintf(try_path, sizeof try_path, "%s/other.yaml", try_folder);
    snprintf(command, sizeof command,
             "{load_path: %s, try_load_latest_save: true, lora: {rank: 2}, data: {paths: a.npy}}",
             base);
    try_write(try_path, command);
    try_refused(saves, NULL, "save_folder");
    strcpy(try_path, saved);
}

/* Without a configuration file, a run has the learning rate for adapters. */
TEST(test_rate)
{
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    write_file(adapter, "adapter_config.json", PEFT(NUMBERS TARGETS BESIDE));
    const struct {
        const char *load, *more;
        double rate;
    } runs[] = {
        { load_base, "--seed=1", 2e-5 },
        { load_base, "--lora.rank=2", 2e-4 },
        { load_adapter, "--seed=1", 2e-4 },
        { load_adapter, "--optimizer.learning_rate=1e-5", 1e-5 },
        { load_adapter, "--optimizer={learning_rate: 1e-6}", 1e-6 },
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        strcpy(try_path, runs[i].load);
        Config *c = try_load(1, "--data.paths=a.npy", runs[i].more, NULL, NULL);
        assert_true(c->optimizer.lr == runs[i].rate);
        config_free(c);
    }
    strcpy(try_path, saved);
}

int main(void)
{
    return run_all_tests(begin, try_remove_folder);
}
