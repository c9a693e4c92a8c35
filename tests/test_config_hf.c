/* config.json: each class in each spelling, from the file through a run's configuration to the file
 * that the run saves. Also refusals; the message names the file, the key, what was found and what
 * was expected. */
#include "model/formats/hf.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZES(class, layers) \
    "\"architectures\": [\"" class "\"], \"hidden_size\": 64, \"intermediate_size\": 96, " \
                                   "\"num_hidden_layers\": " #layers ", " \
                                   "\"num_attention_heads\": 4, \"vocab_size\": 90, " \
                                   "\"max_position_embeddings\": 512, \"torch_dtype\": " \
                                   "\"float32\""
#define YARN \
    "\"rope_type\": \"yarn\", \"factor\": 8.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, " \
    "\"original_max_position_embeddings\": 64"
#define FULL4 "\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\""
#define MISTRAL SIZES("MistralForCausalLM", 2) ", \"num_key_value_heads\": 2"
#define MINISTRAL SIZES("MinistralForCausalLM", 2) ", \"num_key_value_heads\": 2"
#define QWEN3 \
    SIZES("Qwen3ForCausalLM", 4) \
    ", \"num_key_value_heads\": 2, \"head_dim\": 24, \"rms_norm_eps\": 1e-6"
#define QWEN2 SIZES("Qwen2ForCausalLM", 4) ", \"num_key_value_heads\": 2"
#define SMOLLM3 SIZES("SmolLM3ForCausalLM", 4)
#define OLMO3 SIZES("Olmo3ForCausalLM", 8)

/* The blocks as letters: s is sliding, f is full attention. */
typedef struct {
    const char *json, *blocks;
    int kv_heads, head_dim, window;
    double theta;
    RopeType rope;
} Case;

static const Case cases[] = {
    { SIZES("LlamaForCausalLM", 2) ", \"rope_theta\": 5e5, \"sliding_window\": null, "
                                   "\"layer_types\": [\"full_attention\"]",
      "ff", 4, 16, 0, 5e5, ROPE_DEFAULT },
    { SIZES("LlamaForCausalLM", 2) ", \"rope_scaling\": {" YARN "}, \"head_dim\": 8", "ff", 4, 8, 0,
      1e4, ROPE_YARN },
    { SIZES("OlmoForCausalLM", 2) ", \"clip_qkv\": 8.0, \"tie_word_embeddings\": true", "ff", 4, 16,
      0, 1e4, ROPE_DEFAULT },
    { SIZES("Olmo2ForCausalLM",
            2) ", \"rms_norm_eps\": 1e-06, \"rope_parameters\": {\"rope_theta\": 3e4}",
      "ff", 4, 16, 0, 3e4, ROPE_DEFAULT },
    { MISTRAL ", \"sliding_window\": 7, \"rms_norm_eps\": 1e-05", "ss", 2, 16, 7, 1e4,
      ROPE_DEFAULT },
    { MISTRAL ", \"sliding_window\": null, \"head_dim\": 32, \"rope_theta\": 1e6", "ff", 2, 32, 0,
      1e6, ROPE_DEFAULT },
    { MISTRAL, "ss", 2, 16, 4096, 1e4, ROPE_DEFAULT },
    { MISTRAL ", \"rope_scaling\": {" YARN ", \"attention_factor\": 1.25}", "ss", 2, 16, 4096, 1e4,
      ROPE_YARN },
    { MINISTRAL
      ", \"sliding_window\": 7, \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
      "fs", 2, 16, 7, 1e4, ROPE_DEFAULT },
    { MINISTRAL ", \"sliding_window\": 7, \"model_type\": \"ministral\"", "ss", 2, 16, 7, 1e4,
      ROPE_DEFAULT },
    { SIZES("Qwen3ForCausalLM", 1) ", \"num_key_value_heads\": 1", "f", 1, 128, 0, 1e4,
      ROPE_DEFAULT },
    { QWEN3 ", \"sliding_window\": 4096, \"max_window_layers\": 2", "ffff", 2, 24, 0, 1e4,
      ROPE_DEFAULT },
    { QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": 9, \"max_window_layers\": 3, "
            "\"tie_word_embeddings\": true",
      "fffs", 2, 24, 9, 1e4, ROPE_DEFAULT },
    { QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": 9, \"max_window_layers\": 0",
      "ssss", 2, 24, 9, 1e4, ROPE_DEFAULT },
    { QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": 9, \"layer_types\": "
            "[\"sliding_attention\", \"full_attention\", "
            "\"full_attention\", \"sliding_attention\"], \"rope_parameters\": {\"rope_theta\": "
            "1000000.0, " YARN "}",
      "sffs", 2, 24, 9, 1e6, ROPE_YARN },
    { QWEN3 ", \"rope_theta\": 1e6, \"rope_scaling\": {" YARN "}", "ffff", 2, 24, 0, 1e6,
      ROPE_YARN },
    { QWEN2 ", \"sliding_window\": 131072, \"max_window_layers\": 28, \"use_mrope\": false", "ffff",
      2, 16, 0, 1e4, ROPE_DEFAULT },
    { QWEN2 ", \"use_sliding_window\": true, \"sliding_window\": 9, \"max_window_layers\": 3, "
            "\"rope_theta\": 1e6",
      "fffs", 2, 16, 9, 1e6, ROPE_DEFAULT },
    { OLMO3, "sssfsssf", 4, 16, 4096, 5e5, ROPE_DEFAULT },
    { OLMO3 ", \"num_key_value_heads\": 1, \"rope_theta\": 1e4, \"sliding_window\": 5", "sssfsssf",
      1, 16, 5, 1e4, ROPE_DEFAULT },
    { OLMO3 ", \"rope_theta\": 7e5, \"rope_scaling\": {" YARN "}", "sssfsssf", 4, 16, 4096, 7e5,
      ROPE_YARN },
    { OLMO3 ", \"rope_parameters\": {\"rope_theta\": 500000, \"rope_type\": \"default\"}",
      "sssfsssf", 4, 16, 4096, 5e5, ROPE_DEFAULT },
    { OLMO3 ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 6e5, " YARN "}, "
            "\"sliding_attention\": {\"rope_theta\": 6e5, \"rope_type\": \"default\"}}, "
            "\"sliding_window\": 6",
      "sssfsssf", 4, 16, 6, 6e5, ROPE_YARN },
    { OLMO3 ", \"layer_types\": [" FULL4 ", " FULL4 "], \"rope_scaling\": {" YARN "}", "ffffffff",
      4, 16, 0, 5e5, ROPE_YARN },
};
enum { CASES = sizeof cases / sizeof cases[0] };

static char from[128], path[128];

static Config *load_case(const char *json)
{
    char text[4096];
    snprintf(text, sizeof text, "{%s}", json);
    try_write_hf(text);
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    snprintf(path, sizeof path, "%s/config.json", try_folder);
    return try_load(1, from, NULL, NULL, NULL);
}

static void check_model(const Case *k, const ModelConfig *m)
{
    assert_int_equal(m->n_kv_heads, k->kv_heads);
    assert_int_equal(m->head_dim, k->head_dim);
    assert_int_equal(m->sliding_window, k->window);
    assert_true(m->rope_theta == k->theta);
    assert_int_equal(m->rope_scaling.type, k->rope);
    assert_int_equal(m->n_layers, strlen(k->blocks));
    for (int l = 0; l < m->n_layers; l++) {
        assert_int_equal(layer_slides(m, l), k->blocks[l] == 's');
        const bool scaled =
            k->rope != ROPE_DEFAULT && !(strstr(k->json, "Olmo3") && k->blocks[l] == 's');
        assert_int_equal(layer_is_scaled(m, l), scaled);
    }
}

static bool same_value(const json_t *a, const json_t *b)
{
    return json_is_number(a) && json_is_number(b) ? json_number_value(a) == json_number_value(b)
                                                  : json_equal(a, b);
}

/* The keys that both have are equal, except a window that no block uses, which a class may store
 * differently. */
static void check_written(const Case *k, const json_t *was, json_t *now)
{
    const char *key;
    json_t *value;
    int common = 0;
    json_object_foreach(now, key, value)
    {
        const json_t *before = json_object_get(was, key);
        const bool idle = k->window == 0 && (strcmp(key, "sliding_window") == 0 ||
                                             strcmp(key, "max_window_layers") == 0);
        common += before != NULL;
        if (before && !idle && strncmp(key, "rope_", 5) != 0 && !same_value(before, value))
            fail_msg("%s: %s was written otherwise: %s", k->json, key,
                     json_dumps(value, JSON_ENCODE_ANY));
    }
    assert_true(common >= 8);
}

/* config.json -> run -> config.json gives the same class and the same values. The run's own text
 * gives the same model. */
TEST(test_round_trip)
{
    for (int i = 0; i < CASES; i++) {
        Config *c = load_case(cases[i].json);
        json_t *was = json_load_file(path, 0, NULL), *now = hf_config(&c->model, F32);
        check_model(&cases[i], &c->model);
        check_written(&cases[i], was, now);

        ModelConfig again = { .init_std = c->model.init_std };
        assert_int_equal(json_dump_file(now, path, 0), 0);
        hf_read(&again, try_folder);
        check_model(&cases[i], &again);
        json_t *twice = hf_config(&again, F32);
        if (!json_equal(now, twice))
            fail_msg("%s\n%s", json_dumps(now, 0), json_dumps(twice, 0));

        /* the text describes the model, so the folder is not read */
        try_write(path, "{}");
        try_write(try_path, c->text);
        Config *text = try_load(1, NULL, NULL, NULL, NULL);
        assert_memory_equal(&c->model, &text->model, sizeof c->model);
        config_free(text);
        config_free(c);
        json_decref(was);
        json_decref(now);
        json_decref(twice);
    }
}

/* Without `architectures`, as in a configuration that was saved without a model, model_type gives
 * the class. */
TEST(test_model_type)
{
    for (int i = 0; i < CASES; i++) {
        Config *c = load_case(cases[i].json);
        ModelConfig again = { 0 };
        json_t *j = hf_config(&c->model, F32);
        json_object_del(j, "architectures");
        assert_int_equal(json_dump_file(j, path, 0), 0);
        hf_read(&again, try_folder);
        assert_ptr_equal(again.architecture, c->model.architecture);
        json_decref(j);
        config_free(c);
    }
}

/* transformers 4 and 5 read the same model from the written file. Version 4 reads rope_theta and
 * rope_scaling. Version 5 reads them, too, but uses rope_theta for blocks of full attention only if
 * rope_parameters does not have it for both kinds of blocks. */
TEST(test_both_spellings)
{
    Config *c = load_case(OLMO3 ", \"rope_theta\": 7e5, \"rope_scaling\": {" YARN "}");
    json_t *j = hf_config(&c->model, BF16), *types = json_object_get(j, "rope_parameters");
    json_t *full = json_object_get(types, "full_attention"),
           *sliding = json_object_get(types, "sliding_attention");
    assert_true(json_number_value(json_object_get(j, "rope_theta")) == 7e5);
    assert_true(json_number_value(json_object_get(full, "rope_theta")) == 7e5);
    assert_true(json_number_value(json_object_get(sliding, "rope_theta")) == 7e5);
    assert_string_equal(json_string_value(json_object_get(sliding, "rope_type")), "default");
    json_object_del(full, "rope_theta");
    assert_true(json_equal(full, json_object_get(j, "rope_scaling")));
    /* without attention_factor, which then follows from the factor */
    assert_int_equal(json_object_size(full), 5);
    assert_int_equal(json_array_size(json_object_get(j, "layer_types")), 8);
    json_decref(j);
    config_free(c);

    c = load_case(OLMO3 ", \"layer_types\": [" FULL4 ", " FULL4 "]");
    j = hf_config(&c->model, BF16);
    /* transformers 5 does not accept null here */
    assert_true(json_is_integer(json_object_get(j, "sliding_window")));
    json_decref(j);
    config_free(c);
}

/* The interval that no_rope_layers means. The written file means the same, with the list and
 * without it. */
TEST(test_no_rope)
{
    static const struct {
        const char *json;
        int interval;
    } list[] = {
        { "", 4 },
        { ", \"no_rope_layer_interval\": 3", 3 },
        { ", \"no_rope_layer_interval\": 9", 0 },
        { ", \"no_rope_layers\": [1, 0, 1, 0]", 2 },
        { ", \"no_rope_layers\": [0, 0, 0, 0]", 1 },
        { ", \"no_rope_layers\": [1, 1, 1, 1], \"no_rope_layer_interval\": 2", 0 },
        { ", \"no_rope_layers\": [1, 1, 1, 0]", 4 },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char json[2048];
        snprintf(json, sizeof json, "%s%s", SMOLLM3, list[i].json);
        Config *c = load_case(json);
        json_t *now = hf_config(&c->model, F32);
        assert_string_equal(c->model.architecture->class, "SmolLM3ForCausalLM");
        assert_int_equal(c->model.no_rope_interval, list[i].interval);
        for (int with = 1; with >= 0; with--) {
            ModelConfig again = { .init_std = c->model.init_std };
            assert_int_equal(json_array_size(json_object_get(now, "no_rope_layers")), with ? 4 : 0);
            assert_int_equal(json_dump_file(now, path, 0), 0);
            hf_read(&again, try_folder);
            assert_int_equal(again.no_rope_interval, list[i].interval);
            json_object_del(now, "no_rope_layers");
        }
        json_decref(now);
        config_free(c);
    }
}

/* A setting that changes a loaded model: the class stays if it can compute the changed model; else
 * another class or no class is found. */
TEST(test_changed)
{
    config_free(load_case(MISTRAL ", \"sliding_window\": 7"));
    Config *c = try_load(1, from, "--model.sliding_window=null", NULL, NULL);
    assert_string_equal(architecture_of(&c->model)->class, "MistralForCausalLM");
    config_free(c);
    c = try_load(1, from, "--model.layer_types=[sliding_attention, full_attention]",
                 "--model.attention_layer_norm=head", NULL);
    assert_string_equal(architecture_of(&c->model)->class, "Qwen3ForCausalLM");
    assert_int_equal(c->model.layer_types.count, 2);
    try_contains(c->text, "architecture: null");
    config_free(c);
    c = try_load(1, from, "--model.rope_scaling={rope_type: yarn, factor: 4}", NULL, NULL);
    assert_true(c->model.rope_scaling.type == ROPE_YARN && c->model.rope_scaling.beta_fast == 32);
    config_free(c);

    try_accepted(from, "--model.layer_types=[full_attention]",
                 "model.sliding_window model.layer_types sliding_attention");
    try_accepted(from, "--model.rope_scaling={rope_type: default, factor: 8}",
                 "model.rope_scaling.factor rope_type default");
}

#define LLAMA SIZES("LlamaForCausalLM", 2)

typedef struct {
    const char *json, *names;
} Refused;

static void refuse_all(const Refused *list, size_t count)
{
    char message[8192], text[4096], expected[256];
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    snprintf(expected, sizeof expected, "error: %s/config.json: ", try_folder);
    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof text, "{%s}", list[i].json);
        try_write_hf(text);
        if (try_printed(message, sizeof message, 2, 1, from, NULL))
            fail_msg("%s was accepted", list[i].json);
        try_names(message, list[i].names);
        try_contains(message, expected);
    }
}

TEST(test_refused)
{
    static const Refused list[] = {
        { LLAMA ", \"rms_norm_eps\": -1e-6", "rms_norm_eps 0 1 -1e-6" },
        { LLAMA ", \"num_hidden_layers\": 134217728", "num_hidden_layers 1 10000 134217728" },
        { LLAMA ", \"num_hidden_layers\": 1.5", "num_hidden_layers 1 10000 1.5" },
        { LLAMA ", \"intermediate_size\": 0", "intermediate_size 1 1073741823 0" },
        { LLAMA ", \"vocab_size\": 2147483647", "vocab_size 2 2147483520 2147483647" },
        { LLAMA ", \"hidden_size\": null", "hidden_size 1 2147483647" },
        { LLAMA ", \"num_key_value_heads\": 3", "num_key_value_heads num_attention_heads 4 3" },
        { LLAMA ", \"num_attention_heads\": 5", "num_attention_heads hidden_size 64 5" },
        { LLAMA ", \"head_dim\": 7", "head_dim" },
        { LLAMA ", \"head_dim\": 5000", "head_dim 2 4096 5000" },
        { SIZES("LlamaForCausalLM", 2) ", \"hidden_size\": 32768",
          "num_attention_heads 2 4096 hidden_size 32768 4 8192" },
        { LLAMA ", \"eos_token_id\": \"a\"", "eos_token_id" },
        { LLAMA ", \"pad_token_id\": 1.5", "pad_token_id 1.5" },
        { LLAMA ", \"tie_word_embeddings\": 1", "tie_word_embeddings 1" },
        { LLAMA ", \"attention_dropout\": 0.1", "attention_dropout 0.1 0.0" },
        { LLAMA ", \"hidden_act\": \"gelu\"", "hidden_act" },
        { LLAMA ", \"sliding_window\": 7", "sliding_window 7" },
        { LLAMA ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]", "layer_types" },
        { LLAMA ", \"is_causal\": false", "is_causal" },
        { LLAMA ", \"model_type\": \"mistral\"", "model_type" },
        { LLAMA ", \"model_type\": \"phi3\"", "model_type phi3" },
        { MISTRAL ", \"model_type\": \"ministral\"", "model_type" },
        { LLAMA ", \"architectures\": \"LlamaForCausalLM\"", "architectures LlamaForCausalLM" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* Rotary embeddings. */
TEST(test_rope_refused)
{
    static const Refused list[] = {
        { LLAMA ", \"rope_theta\": -1", "rope_theta 1 1e+12 -1" },
        { LLAMA ", \"rope_parameters\": {\"rope_theta\": \"x\"}", "rope_theta 1 1e+12" },
        { LLAMA ", \"rope_scaling\": {\"rope_type\": 3}", "rope_type llama3 3" },
        { LLAMA ", \"partial_rotary_factor\": 0.5", "partial_rotary_factor 0.5 1.0" },
        { LLAMA ", \"rope_scaling\": {\"rope_type\": \"default\", \"type\": \"yarn\"}",
          "rope_type" },
        { LLAMA ", \"rope_scaling\": {" YARN "}, \"original_max_position_embeddings\": 32",
          "original_max_position_embeddings 32 64" },
        { OLMO3 ", \"rope_parameters\": {\"rope_theta\": 7e5}",
          "rope_parameters Olmo3ForCausalLM" },
        { OLMO3 ", \"rope_parameters\": {\"rope_theta\": 5e5, " YARN "}",
          "rope_parameters Olmo3ForCausalLM" },
        { LLAMA ", \"rope_scaling\": \"yarn\"", "rope_scaling" },
        { LLAMA ", \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}", "rope_type dynamic" },
        { LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\"}", "1 1000000" },
        { LLAMA
          ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4}",
          "high_freq_factor 4 low_freq_factor" },
        { LLAMA ", \"rope_scaling\": {" YARN ", \"truncate\": false}", "truncate false true" },
        { LLAMA ", \"rope_scaling\": {" YARN ", \"mscale\": 1.0}", "1.0" },
        { LLAMA ", \"rope_scaling\": {" YARN ", \"beta_fast\": 0.5}", "beta_fast 0.5 beta_slow 1" },
        { LLAMA ", \"rope_parameters\": {\"full_attention\": {}}", "LlamaForCausalLM" },
        { OLMO3 ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}, "
                "\"sliding_attention\": {\"rope_theta\": 2e4}}",
          "rope_type rope_theta full_attention 10000" },
        { OLMO3 ", \"rope_parameters\": {\"full_attention\": {" YARN
                "}, \"sliding_attention\": {" YARN "}}",
          "rope_parameters.sliding_attention rope_type" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* Keys of single classes: windows, layers, and heads whose number the keys give. */
TEST(test_classes_refused)
{
    static const Refused list[] = {
        { QWEN3 ", \"use_sliding_window\": 1", "use_sliding_window 1" },
        { SIZES("OlmoForCausalLM", 2) ", \"clip_qkv\": -8", "clip_qkv 0" },
        { MISTRAL ", \"sliding_window\": 0", "sliding_window 1 2147483647 0" },
        { SIZES("MistralForCausalLM", 2), "num_key_value_heads num_attention_heads 4 8" },
        { SIZES("Qwen3ForCausalLM", 2), "num_key_value_heads num_attention_heads 4 32" },
        { SMOLLM3 ", \"no_rope_layers\": [1, 0, 0, 1]", "no_rope_layers 1 0 n-th" },
        { SMOLLM3 ", \"no_rope_layers\": [1, 0, 1]", "no_rope_layers" },
        { SMOLLM3 ", \"no_rope_layers\": [1, true, 1, 0]", "no_rope_layers true" },
        { SMOLLM3 ", \"no_rope_layer_interval\": 0", "no_rope_layer_interval 0 1 or more" },
        { SMOLLM3 ", \"use_sliding_window\": true, \"sliding_window\": 5", "sliding_window" },
        { QWEN3 ", \"max_window_layers\": -1", "max_window_layers -1" },
        { QWEN3 ", \"layer_types\": [\"full_attention\"]", "layer_types num_hidden_layers" },
        { QWEN3 ", \"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
                "\"chunked_attention\"]",
          "layer_types sliding_attention full_attention" },
        { QWEN3 ", \"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
                "\"sliding_attention\"]",
          "layer_types sliding_attention sliding_window" },
        { SIZES("Olmo3ForCausalLM",
                5) ", \"sliding_window\": null, \"layer_types\": [\"sliding_attention\", " FULL4
                   "]",
          "sliding_window" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* Token ids beyond the vocabulary are not used. */
TEST(test_ids)
{
    char message[8192];
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    try_write_hf("{" LLAMA ", \"eos_token_id\": 90, \"pad_token_id\": -1}");
    assert_true(try_printed(message, sizeof message, 2, 1, from, NULL));
    try_names(message, "config.json eos_token_id 90 vocab_size");
    assert_null(strstr(message, "pad_token_id"));
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
