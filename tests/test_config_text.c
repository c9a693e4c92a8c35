/* model/config as text: the written form of a configuration, the shipped files, the table of keys,
 * and the help texts and README that are made from the table. */
#include "kernels/kernels.h"
#include "kernels/random.h"
#include "kernels/runtime/version.h"
#include "kernels/runtime/error.h"
#include "model/config/export_options.h"
#include "model/config/help.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/yaml.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <glob.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Loading the written text of a configuration gives the same configuration. */
static void check_reload(Config *c)
{
    try_write(try_path, c->text);
    Config *again = try_load(1, NULL, NULL, NULL, NULL);
    assert_string_equal(c->text, again->text);
    ModelConfig model = again->model; /* except for the address of a text */
    assert_true(c->model.lora.base_path ? strcmp(c->model.lora.base_path, model.lora.base_path) == 0
                                        : !model.lora.base_path);
    model.lora.base_path = c->model.lora.base_path;
    assert_memory_equal(&c->model, &model, sizeof model);
    assert_string_equal(c->optimizer.name, again->optimizer.name);
    assert_memory_equal(&c->optimizer.lr, &again->optimizer.lr,
                        sizeof c->optimizer - sizeof c->optimizer.name);
    assert_memory_equal(&c->scheduler, &again->scheduler, sizeof c->scheduler);
    assert_memory_equal(&c->max_duration, &again->max_duration, sizeof c->max_duration);
    assert_true(format_equal(c->recipe.moment2, again->recipe.moment2) &&
                c->recipe.keep == again->recipe.keep &&
                c->recipe.recompute == again->recipe.recompute);
    assert_true(c->z_loss == again->z_loss && c->data.seed == again->data.seed &&
                c->num_eval == again->num_eval);
    for (int i = 0; i < c->num_eval; i++) {
        assert_string_equal(c->eval[i].label, again->eval[i].label);
        assert_int_equal(c->eval[i].files.itemsize, again->eval[i].files.itemsize);
        assert_int_equal(c->eval[i].downstream, again->eval[i].downstream);
    }
    config_free(again);
    config_free(c);
}

TEST(test_reload)
{
    try_write(try_path, try_complete);
    check_reload(try_load(1, NULL, NULL, NULL, NULL));
    try_write(try_path, try_published);
    check_reload(try_load(1, "--recipe=f32", "--format={moment1: e4m3/128, moment2: e5m2/128}",
                          "--max_duration=0.1ep", "--optimizer.learning_rate=0.1234567890123456"));
    try_write(try_path, try_complete);
    check_reload(try_load(1, "--run_name=a \"b\" \\: #c",
                          "--data.paths=['null', '~', 'x: y', 'true', '']",
                          "--activations.recompute=three_in_four",
                          "--model={rope_scaling: {rope_type: llama3, factor: 8}, clip_qkv: 0.3, "
                          "mlp_hidden_size: 96, "
                          "layer_norm_type: default, layer_norm_with_affine: false}"));
    try_write(try_path, try_complete);
    check_reload(try_load(1, "--data.seed=0", "--eval_interval=null", "--scheduler.warmup_min_lr=0",
                          "--max_duration=7e9T"));
    try_write(try_path, try_complete);
    check_reload(try_load(1,
                          "--evaluators=[{label: a, type: downstream, data: {paths: q}}, {label: "
                          "b, data: {paths: b}}]",
                          NULL, NULL, NULL));
}

/* Names, labels and paths with characters that have a meaning in YAML or need escapes are read back
 * unchanged. */
TEST(test_reload_texts)
{
    static const char *const pieces[] = {
        "a",
        "B c",
        "\"",
        "'",
        "\\",
        "\n",
        "\r",
        "\t",
        "\x01",
        "\x7f",
        ": ",
        ":",
        " #",
        "#",
        "- ",
        "-",
        "? ",
        "*",
        "&",
        "!",
        "%",
        "@",
        "`",
        "|",
        ">",
        "[",
        "]",
        "{",
        "}",
        ",",
        "~",
        "$",
        "null",
        "Null",
        "true",
        "No",
        "1e3",
        "0x10",
        "1_000",
        "007",
        ".inf",
        ".",
        "<<",
        "=",
        " ",
        "---",
        "...",
        "\xc2\x85",
        "\xc2\xa0",
        "\xc3\xa9",
        "\xe2\x80\xa8",
        "\xe6\xbc\xa2",
        "\xef\xbb\xbf",
        "\xef\xbf\xbe",
        "\xf0\x9f\x98\x80",
        ("01234567890123456789012345678901234567890123456789"
         "01234567890123456789012345678901234567890123456789"),
    };
    enum { PIECES = sizeof pieces / sizeof *pieces, TEXTS = 2 * PIECES };
    for (uint64_t i = 0; i < TEXTS; i++) {
        char text[1024] = "";
        for (uint64_t n = i < PIECES ? 0 : 1 + random_bits(1, i) % 8; n > 0; n--)
            strcat(text, pieces[random_bits(i, n) % PIECES]);
        strcat(text, pieces[i % PIECES]);
        json_t *string = json_string(text);
        char *quoted = json_dumps(string, JSON_ENCODE_ANY),
             *name = xasprintf("--run_name=%s", quoted);
        char *paths = xasprintf("--data.paths=[%s]", quoted);
        char *sets = xasprintf("--evaluators=[{label: %s, data: {paths: [%s]}}]", quoted, quoted);
        try_write(try_path, try_complete);
        Config *c = try_load(1, name, "--save_folder=x", paths, sets);
        json_decref(string);
        free(quoted);
        free(name);
        free(paths);
        free(sets);
        try_write(try_path, c->text);
        Config *again = try_load(1, NULL, NULL, NULL, NULL);
        const char *const found[] = { again->run_name, again->data.files.paths[0],
                                      again->eval[0].label, again->eval[0].files.paths[0] };
        for (int k = 0; k < 4; k++)
            assert_string_equal(found[k], text);
        assert_string_equal(c->text, again->text);
        config_free(again);
        config_free(c);
    }
}

static void replace(char **text, const char *from, const char *to)
{
    char *at = strstr(*text, from);
    if (!at)
        fail_msg("no %s", from);
    char *all = xasprintf("%.*s%s%s", (int)(at - *text), *text, to, at + strlen(from));
    free(*text);
    *text = all;
}

/* The config.yaml of an earlier version (tests/configs/README.md), in the folder of a checkpoint:
 * it has the names of that version. */
TEST(test_reload_old)
{
    static const char *const names[][2] = {
        { "\n  stream: ", "\n  residual: " },
        { "\n  saved: ", "\n  saved_norm_input: " },
        { "\n  qkv: ", "\n  saved_qkv: " },
        { "\n  att: ", "\n  saved_attention: " },
        { "\n  hidden: ", "\n  saved_mlp: " },
        { "\n  max_sequence_length: ",
          "\n  num_experts: null\n  num_experts_per_tok: 8\n  mlp_layer_types: null\n"
          "  dense_intermediate_size: null\n  norm_topk_prob: false\n"
          "  router_aux_loss: micro_batch\n  router_aux_loss_coef: 0.01\n  router_z_loss_coef: 0\n"
          "  bias_gamma: null\n  max_sequence_length: " },
        { "\nloss_chunk: ", "\nloss_temperature: 1\nloss_chunk: " },
        { "\ngenerate: ", "\nscore: null\ntop_k: null\ntop_k_by: rank\ngenerate: " },
        { "\nsave_folder: ",
          "\npreference:\n  loss: none\n  beta: null\n  gamma: null\n  label_smoothing: 0\n"
          "  sft_weight: null\n  reference: null\ndistill:\n  loss: none\n  targets: null\n"
          "  temperature: 1\n  ce_weight: 0\npolicy:\n  loss: none\n  denominator: null\n"
          "  constant: 512\n  clip_low: null\n  clip_high: null\n  importance_max: 3\n  beta: 0\n"
          "save_folder: " },
        { "\nparallelism:", "\n  grad_wire: null\nparallelism:" },
        { "\n  adjust_lr: ", "\n  adjust_lr_fn: " },
        { "\nnetwork: ", "\ninternode_gb_per_s: " },
        { "\nmlp_tile: ", "\ntiled_mlp_tokens: " },
        { "\nhost:\n  activations: auto\n  base: auto\n  moments: auto\n  master: auto\n",
          "\noffload:\n  activations: auto\n  frozen: auto\n  optimizer: auto\n  master: auto\n" },
    };
    char saved[sizeof try_path], sign[sizeof try_path], *text = NULL;
    size_t size = 0;
    FILE *f = fopen("tests/configs/old-config.yaml", "r");
    assert_non_null(f);
    assert_true(getdelim(&text, &size, '\0', f) > 0);
    fclose(f);
    strcpy(saved, try_path);
    snprintf(try_path, sizeof try_path, "%s/config.yaml", try_folder);
    snprintf(sign, sizeof sign, "%s/trainer.json", try_folder);
    try_write(try_path, text);
    try_write(sign, "");
    try_accepted(NULL, NULL, "");
    Config *c = try_load(1, NULL, NULL, NULL, NULL);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        replace(&text, names[i][0], names[i][1]);
    assert_string_equal(c->text, text);
    assert_int_equal(remove(sign), 0);
    assert_int_equal(remove(try_path), 0);
    strcpy(try_path, saved);
    config_free(c);
    free(text);
}

/* The config.yaml of a run with another recipe or seed: derived values follow the new one, all
 * other values stay. */
TEST(test_reload_changed)
{
    try_write(try_path, try_complete);
    Config *c =
        try_load(1, "--recipe=bf16", "--format.moment1=bf16", "--format.moment2=bf16", NULL);
    try_write(try_path, c->text);
    Config *changed = try_load(1, "--recipe=fp8", "--seed=5", NULL, NULL);
    assert_int_equal(changed->recipe.operand.dtype, E4M3);
    assert_int_equal(changed->recipe.moment1.dtype, BF16);
    assert_int_equal(changed->data.seed, 5);
    config_free(changed);
    config_free(c);
}

static bool has(const char *path, const char *key)
{
    YamlNode *root = yaml_load(path);
    const bool found = yaml_find(root, key) != NULL;
    yaml_free(root);
    return found;
}

#define LLAVA \
    "{\"architectures\": [\"LlavaForConditionalGeneration\"], \"model_type\": \"llava\", " \
    "\"image_token_index\": 7, " \
    "\"image_feature_size\": 48, \"image_seq_length\": 4, " \
    "\"text_config\": {\"model_type\": \"llama\", \"eos_token_id\": 2, " TRY_LLAMA "}}"

/* The shipped files and their written texts. Files that start from a published model get a
 * model. */
TEST(test_shipped)
{
    glob_t files;
    char load[128];
    int tuned = 0;
    snprintf(load, sizeof load, "--load_path=%s", try_folder);
    assert_int_equal(glob("configs/*.yaml", 0, NULL, &files), 0);
    assert_true(files.gl_pathc >= 6);
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char *path = files.gl_pathv[i], *model = has(path, "load_path") ? load : NULL;
        /* its model is small */
        const char *rank = has(path, "lora.rank") ? "--lora.rank=16" : NULL;
        try_write_hf(has(path, "data.image_paths") ? LLAVA
                                                   : "{" TRY_LLAMA ", \"eos_token_id\": 2}");
        snprintf(try_path, sizeof try_path, "%s", path);
        tuned += model != NULL;
        try_accepted(model, rank, "");
        Config *c = try_load(1, model, rank, NULL, NULL);
        strcpy(try_path, saved);
        check_reload(c);
    }
    assert_true(tuned >= 4);
    globfree(&files);
}

TEST(test_table)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        int type = k->type & TYPE_MASK;
        for (const ConfigKey *other = k + 1; other->name; other++) {
            assert_string_not_equal(k->name, other->name);
            bool same_struct = key_element_prefix(k->name) == key_element_prefix(other->name);
            if (type < FIXED && (other->type & TYPE_MASK) < FIXED && same_struct)
                assert_int_not_equal(k->offset, other->offset);
        }
        assert_non_null(k->help);
        assert_ptr_equal(key_find(k->name), k);
    }
    assert_null(key_find("model"));
}

TEST(test_help)
{
    static char text[1 << 17];
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    strcpy(try_path, "--help");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    for (const ConfigKey *k = config_keys; k->name; k++)
        try_contains(text, k->name);
    strcpy(try_path, "configs/tiny.yaml");
    for (int i = 0; i < 2; i++) {
        assert_true(try_printed(text, sizeof text, 1, 1, "--seed=1", i ? "-h" : "--help"));
        try_contains(text, "usage: [mpirun");
    }
    strcpy(try_path, "--help=data.paths");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    try_names(text, "data.paths [a, b]");
    assert_null(strstr(text, "data.seed"));
    strcpy(try_path, "--help=model.rope_scaling");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    try_names(text, "model.rope_scaling.beta_fast 0 1000000 32");
    assert_null(strstr(text, "rope_theta"));
    strcpy(try_path, "--help=tokenizer");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    try_names(text, "tokenizer:");
    /* some options of modes are also keys of a run */
    for (const ConfigKey *k = export_options_keys; k->name; k++) {
        snprintf(try_path, sizeof try_path, "--help=%s", k->name);
        assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
        try_contains(text, k->help);
        if (strcmp(k->name, "export") != 0)
            assert_int_equal(!strncmp(text, "with --export:\n", 15),
                             !key_find(k->name) && strcmp(k->name, "average") != 0);
    }
    strcpy(try_path, "--version");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    try_contains(text, "coat.c " COAT_VERSION ", built for ");
    strcpy(try_path, "--help=markdown");
    assert_true(try_printed(text, sizeof text, 1, 1, NULL, NULL));
    try_names(text, "`optimizer.eps` 1e-15 1 1e-5");
    strcpy(try_path, saved);
}

/* Every mode has a section with its options, in this order. */
TEST(test_help_sections)
{
    static const char *const parts[] = {
        "\nThe run, and its mode if it does not train:\n  run_name: ",
        "  eval_only: ",
        "\nWith --generate:\n  max_new_tokens: ",
        "\nWith --dry_run:\n  ranks: ",
        "\nMemory:\n  device_memory: ",
        "\nStorage formats and FP8:\n  recipe: ",
        "\nFrozen weights and adapters:\n  trainable: ",
        "\nModel:\n  model.",
        "\nData:\n  data.",
        "\nBatch and duration:\n  global_train_batch_size: ",
        "  extend: ",
        "\nOptimizer:\n  optimizer.name: ",
        "\nLR schedule:\n  scheduler.name: ",
        "\nTraining step:\n  average.last: ",
        "\nCheckpoints:\n  save_folder: ",
        "\nEvaluation:\n  eval_interval: ",
        "\nParallelism:\n  fsdp.",
        "\nCPU offload:\n  offload.activations: ",
        "\nLog:\n  profile: ",
        "\nWith --export or --average, which take no CONFIG.yaml:\n  export: ",
        "  average: ",
        "  calibration: ",
    };
    static char text[1 << 17];
    const char *at = text;
    assert_true(try_printed(text, sizeof text, 1, 1, "--help", NULL));
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (!(at = strstr(at, parts[i])))
            fail_msg("not there, or earlier: %s", parts[i]);
}

/* Keys of earlier versions, and other names. */
TEST(test_help_removed)
{
    static const struct {
        const char *name, *now;
    } cases[] = {
        { "stop_after", "stop_at" },
        { "early_stopping_factor", "spikes stop" },
        { "wandb.project", "scripts/watch.py" },
        { "quantize_model.fabit", "recipe format" },
        { "format.expand", "format.moment1 e4m3/128+" },
        { "evaluators[].subset_num_batches", "eval_subset_num_batches" },
        { "data.timeout", "none effect" },
        { "network", "internode_gb_per_s" },
        { "host.base", "offload.frozen" },
        { "parallelism.tensor_parallel_degree", "parallelism.tensor" },
    };
    char text[8192];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *argument = xasprintf("--help=%s", cases[i].name);
        assert_true(try_printed(text, sizeof text, 1, 1, argument, NULL));
        try_names(text, cases[i].name);
        try_names(text, cases[i].now);
        free(argument);
    }
}

/* What bash completes after these words; NULL: nothing, so bash completes file names. */
static void check_completion(const char *words, const char *expected)
{
    char *command = xasprintf("bash -c '. %s/completion; COMP_WORDS=(./train %s); "
                              "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _coat_train 2>/dev/null; "
                              "echo \"${COMPREPLY[*]}\"'",
                              try_folder, words);
    char said[1 << 15];
    FILE *f = popen(command, "r");
    said[fread(said, 1, sizeof said - 1, f)] = '\0';
    assert_int_equal(pclose(f), 0);
    if (expected)
        try_names(said, expected);
    else
        assert_string_equal(said, "\n");
    free(command);
}

TEST(test_completion)
{
    static const struct {
        const char *words, *expected;
    } cases[] = {
        { "--offload.", "--offload.activations --offload.frozen --offload.optimizer" },
        { "x.yaml --dt", "--dtype" },
        { "--fp8.scales =", "microbatch step" },
        { "--fp8.scales = m", "microbatch" },
        { "--try_load_latest_save = t", "true" },
        { "--help = tiled", "tiled_mlp_tokens" },
        { "--load_path = con", NULL },
        { "con", NULL },
    };
    static char text[1 << 16];
    char name[128];
    assert_true(try_printed(text, sizeof text, 1, 1, "--completion", NULL));
    snprintf(name, sizeof name, "%s/completion", try_folder);
    try_write(name, text);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_completion(cases[i].words, cases[i].expected);
    remove(name);
}

TEST(test_help_unknown)
{
    static const struct {
        const char *question, *names;
    } unknown[] = {
        { "--help=data.pahts", "data.paths" },
        { "--help=warmup", "scheduler.t_warmup scheduler.warmup_fraction scheduler.warmup_min_lr" },
        { "--help=xyzzyxyzzy", "--help" },
        { "--help=model.d_modelx", "model.d_model" },
        { "--help=dampng", "damping" },
        { "--help=calib", "calibration calibration_sequences calibration_length" },
        { "--help=calibration_lenght", "mean calibration_length?" },
    };
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        strcpy(try_path, unknown[i].question);
        try_refused(NULL, NULL, unknown[i].names);
    }
    strcpy(try_path, saved);
}

/* The changes that a dry run prints first. */
TEST(test_changes)
{
    try_write(try_path, try_complete);
    Config *c = try_load(1, "--data.paths=[a.npy, b.npy, c.npy]", "--seed=6198", "--recipe=coat",
                         "--format.saved_attention=e4m3/16");
    try_contains(c->changes,
                 "run_name=try  recipe=coat  format.saved_attention=e4m3/16  model.d_model=64");
    try_contains(c->changes, "data.paths=[a.npy, ... 3 in all]");
    static const char *const usual[] = {
        "seed", "model.head_dim", "model.n_kv_heads", "format.saved_mlp", "save_folder", "eps"
    };
    for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++)
        assert_null(strstr(c->changes, usual[i]));
    for (const char *line = c->changes; *line;
         line += strcspn(line, "\n") + (line[strcspn(line, "\n")] == '\n'))
        assert_true(strcspn(line, "\n") <= 100);
    config_free(c);

    try_write_hf("{" TRY_LLAMA "}");
    char load[128];
    snprintf(load, sizeof load, "--load_path=%s", try_folder);
    c = try_load(1, load, NULL, NULL, NULL);
    try_contains(c->changes, "model.d_model=64");
    config_free(c);
}

/* Files warm up from 0 unless their papers say otherwise. */
TEST(test_shipped_warmup)
{
    static const char *const names[] = { "Llama-2-7B", "Llama-3-8B", "Mistral-7B", "Qwen2.5-7B",
                                         "Qwen3-8B" };
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(try_path, sizeof try_path, "configs/%s.yaml", names[i]);
        Config *c = try_load(1, NULL, NULL, NULL, NULL);
        assert_true(c->scheduler.warmup_min_lr == 0);
        assert_string_equal(c->recipe.name, "coat");
        config_free(c);
    }
    strcpy(try_path, saved);
}

/* configs/README.md ends with the table of keys. */
TEST(test_readme)
{
    char *table = NULL, *readme = NULL;
    size_t size = 0, length = 0;
    FILE *f = fopen("configs/README.md", "r");
    assert_non_null(f);
    assert_true(getdelim(&readme, &length, '\0', f) > 0);
    fclose(f);
    f = open_memstream(&table, &size);
    help_markdown(f);
    fclose(f);
    const char *start = strstr(readme, "| key | value |");
    assert_non_null(start);
    assert_string_equal(start, table);
    free(table);
    free(readme);
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
