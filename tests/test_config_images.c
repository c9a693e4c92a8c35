/* Keys of models with images and of their data: each is read, written, and read again. Also every
 * refusal. */
#include "model/formats/adapter.h"
#include "model/shape/architecture.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define SEEING "  image_feature_size: 24\n  image_tokens: 4\n  image_token_id: 7\n"
#define DATA "  image_paths: [a.index]\n  image_features: features\n"

/* A complete file with further keys of the model and of the data, and further text at its end. */
static void write_file(const char *model, const char *data, const char *more)
{
    char text[2048];
    snprintf(text, sizeof text,
             "model:\n  d_model: 64\n  n_layers: 2\n  n_heads: 4\n  vocab_size: 100\n  "
             "eos_token_id: 99\n"
             "  layer_norm_type: rms\n  weight_tying: false\n%sdata:\n  paths: "
             "[a.npy]\n%smax_duration: 100\n"
             "global_train_batch_size: 8\ndevice_train_microbatch_size: 2\nsave_folder: runs/x\n%s",
             model, data, more);
    try_write(try_path, text);
}

static void check(const Config *c)
{
    const ImageConfig *i = &c->model.image;
    assert_int_equal(i->feature_size, 24);
    assert_int_equal(i->rows, 4);
    assert_int_equal(i->token_id, 7);
    assert_int_equal(i->projector, PROJECTOR_LINEAR);
    assert_false(i->bias);
    assert_int_equal(c->data.files.num_image_paths, 1);
    assert_string_equal(c->data.files.image_paths[0], "a.index");
    assert_string_equal(c->data.files.image_features, "features");
    assert_int_equal(c->num_eval, 1);
    assert_string_equal(c->eval[0].files.image_paths[0], "b.index");
    assert_string_equal(c->eval[0].files.image_features, "other");
    assert_true(c->optimizer.projector_lr == 2e-5);
}

TEST(test_keys)
{
    write_file(SEEING "  projector: linear\n  projector_bias: false\n", DATA,
               "optimizer: {learning_rate: 1e-4, projector_learning_rate: 2e-5}\n"
               "evaluators:\n- label: v\n  data: {paths: [b.npy], image_paths: [b.index], "
               "image_features: other}\n");
    Config *c = try_load(1, NULL, NULL, NULL, NULL);
    check(c);
    try_write(try_path, c->text);
    config_free(c);
    c = try_load(1, NULL, NULL, NULL, NULL);
    check(c);
    config_free(c);
}

TEST(test_defaults)
{
    write_file(SEEING, "", "");
    Config *c = try_load(1, NULL, NULL, NULL, NULL);
    assert_int_equal(c->model.image.projector, PROJECTOR_MLP);
    assert_true(c->model.image.bias && c->optimizer.projector_lr == 0);
    int count, projector = 0;
    HfTensor *tensor = hf_tensors_of(&c->model, &count);
    for (int i = 0; i < count; i++) {
        const bool own = strncmp(tensor[i].name, "multi_modal_projector.", 22) == 0;
        assert_true(own || strncmp(tensor[i].name, "language_model.", 15) == 0);
        projector += own;
    }
    assert_int_equal(projector, 4);
    free(tensor);
    config_free(c);

    write_file("", "", "");
    c = try_load(1, NULL, NULL, NULL, NULL);
    assert_int_equal(c->model.image.feature_size, 0);
    tensor = hf_tensors_of(&c->model, &count);
    assert_string_equal(tensor[0].name, "model.embed_tokens.weight");
    free(tensor);
    config_free(c);
}

TEST(test_refused)
{
    static const struct {
        const char *model, *data, *more, *text;
    } cases[] = {
        { "  image_feature_size: 24\n  image_token_id: 7\n", "", "",
          "model.image_feature_size needs model.image_tokens" },
        { "  image_feature_size: 24\n  image_tokens: 4\n", "", "",
          "model.image_feature_size needs model.image_token_id" },
        { "  image_feature_size: 20\n  image_tokens: 4\n  image_token_id: 7\n", "", "",
          "20 is not a multiple of 8" },
        { "  image_feature_size: 24\n  image_tokens: 4\n  image_token_id: 100\n", "", "",
          "model.image_token_id 100 is beyond the vocabulary: model.vocab_size is 100" },
        { SEEING "  norm_after: true\n  attention_layer_norm: true\n", "", "",
          "must be a Llama, Mistral or Qwen3, not Olmo2ForCausalLM" },
        { "", DATA, "", "data.image_paths names images, but the model reads only text" },
        { SEEING, "  image_paths: [a.index]\n", "",
          "data.image_paths needs data.image_features, too" },
        { SEEING, "  image_features: features\n", "",
          "data.image_features needs data.image_paths, too" },
        { SEEING, DATA "  instance_filter: {repetition_max_count: 32}\n", "",
          "data.instance_filter would mask every sequence" },
        { SEEING, "  image_paths: [\"s3://x/a.index\"]\n  image_features: features\n", "",
          "only local files are read" },
        { SEEING, "", "optimizer: {learning_rate: 0, projector_learning_rate: 1e-3}\n",
          "optimizer.projector_learning_rate needs an optimizer.learning_rate above 0" },
        { SEEING, "", "evaluators:\n- label: v\n  data: {paths: [b.npy], image_paths: [b.index]}\n",
          "evaluator 'v'" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char said[4096];
        write_file(cases[i].model, cases[i].data, cases[i].more);
        assert_false(try_printed(said, sizeof said, 2, 1, NULL, NULL));
        try_contains(said, cases[i].text);
        try_contains(said, "x.yaml:");
    }
    char said[4096];
    write_file(SEEING, DATA, "");
    assert_false(try_printed(said, sizeof said, 2, 2, "--parallelism.tensor=2", NULL));
    try_contains(said,
                 "parallelism.tensor 2: a model with images cannot be divided among tensor ranks");
    assert_false(try_printed(said, sizeof said, 2, 1, "--data.paths=null",
                             "--data.mix=[{name: a, paths: [a.npy], ratio: 1}]"));
    try_contains(said, "with data.mix each source has its own");
    static const struct {
        const char *model, *mix, *text;
    } mixes[] = {
        { SEEING, "image_paths: [a.images]",
          "data.mix: source 'a': data.mix[].image_paths needs data.mix[].image_features, too" },
        { SEEING, "image_features: features",
          "data.mix[].image_features needs data.mix[].image_paths, too" },
        { SEEING, "image_paths: [\"s3://a.images\"], image_features: x",
          "only local files are read" },
        { "", "image_paths: [a.images], image_features: f",
          "source 'a': data.mix[].image_paths names images, but the model" },
    };
    for (size_t i = 0; i < sizeof mixes / sizeof mixes[0]; i++) {
        char mix[256];
        snprintf(mix, sizeof mix,
                 "--data.mix=[{name: b, paths: [b.npy], ratio: 1}, {name: a, paths: [a.npy], "
                 "ratio: 1, %s}]",
                 mixes[i].mix);
        write_file(mixes[i].model, "", "");
        assert_false(try_printed(said, sizeof said, 2, 1, "--data.paths=null", mix));
        try_contains(said, mixes[i].text);
    }
    write_file(SEEING, "  instance_filter: {repetition_max_count: 32}\n", "");
    assert_false(try_printed(said, sizeof said, 2, 1, "--data.paths=null",
                             "--data.mix=[{name: a, paths: [a.npy], ratio: 1, image_paths: "
                             "[a.images], image_features: f}]"));
    try_contains(said, "data.instance_filter would mask every sequence");
}

/* ---- adapters -------------------------------------------------------------------------------- */

#define GOLDEN "--load_path=tests/golden/"

/* load_path defines the model. */
static void write_run(void)
{
    try_write(try_path, "data: {paths: [a.npy]}\nmax_duration: 100\nglobal_train_batch_size: "
                        "8\nsave_folder: runs/x\n"
                        "device_train_microbatch_size: 2\n");
}

/* PEFT's folders have a regular expression, so that the tower has no adapters. One of the folders
 * also saves the projector. */
TEST(test_adapters_read)
{
    write_run();
    Config *c = try_load(1, GOLDEN "lora/llava-llama", NULL, NULL, NULL);
    assert_true(c->model.lora.projector && c->model.lora.rank == 4);
    for (int k = 0; k < NUM_LORA_MODULES; k++)
        assert_true(c->model.lora.target[k]);
    config_free(c);
    c = try_load(1, GOLDEN "lora/llava-mistral", NULL, NULL, NULL);
    assert_true(c->model.lora.projector && c->model.lora.target[LORA_V] &&
                !c->model.lora.target[LORA_UP]);
    config_free(c);
    c = try_load(1, GOLDEN "lora/llava-qwen3-tied", NULL, NULL, NULL);
    assert_true(!c->model.lora.projector && c->model.lora.target[LORA_GATE] &&
                !c->model.lora.target[LORA_V]);
    config_free(c);
    char said[4096];
    assert_false(
        try_printed(said, sizeof said, 2, 1, GOLDEN "lora/llava-llama", "--lora.projector=false"));
    try_contains(
        said,
        "lora.projector differs from the value of the adapters in tests/golden/lora/llava-llama");
}

static void check_written(const char *more, bool projector)
{
    Config *c = try_load(1, GOLDEN "llava-llama",
                         "--lora={rank: 4, target_modules: [q_proj, up_proj]}", more, NULL);
    char *text = adapter_config_text(c);
    json_t *j = json_loads(text, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(j, "target_modules")),
                        ".*language_model.*\\.(q_proj|up_proj)");
    assert_int_equal(json_array_size(json_object_get(j, "modules_to_save")), projector);
    assert_true(lora_trains_projector(&c->model) == projector);
    json_decref(j);
    free(text);
    config_free(c);
}

TEST(test_adapters_written)
{
    write_run();
    check_written(NULL, true);
    check_written("--lora.projector=false", false);
}

/* Refused: adapters of the tower, and other modules that are trained whole. */
TEST(test_adapters_refused)
{
    static const struct {
        const char *modules, *saved, *header, *text;
    } cases[] = {
        { "\"all\"", "[\"lm_head\"]", "{}",
          "next to adapters only multi_modal_projector is trained" },
        { "\"all\"", "[\"multi_modal_projector\"]", "",
          "adapter_model.safetensors says which modules have adapters" },
        { "\"all\"", "null",
          "{\"base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A."
          "weight\": {}}",
          "gave model.vision_tower.encoder.layers.0.self_attn.q_proj an adapter; only matrices of "
          "the language model's" },
        { "\"all\"", "null",
          "{\"base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight\": {}}",
          "q_proj has an adapter in 1 of 2 blocks" },
        { "[\"model.vision_tower.encoder.layers.0.self_attn.q_proj\"]", "null", "{}",
          "the path of one of these in the base" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char folder[256], path[300], load[300], text[1024], said[4096];
        snprintf(folder, sizeof folder, "%s/adapters%zu", try_folder, i);
        snprintf(text, sizeof text, "mkdir %s", folder);
        assert_int_equal(system(text), 0);
        snprintf(path, sizeof path, "%s/adapter_config.json", folder);
        snprintf(
            text, sizeof text,
            "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 2, \"target_modules\": %s, "
            "\"modules_to_save\": %s, \"base_model_name_or_path\": \"tests/golden/llava-llama\"}",
            cases[i].modules, cases[i].saved);
        try_write(path, text);
        snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
        FILE *f = fopen(path, "wb");
        const uint64_t length = strlen(cases[i].header);
        assert_true(f && fwrite(&length, sizeof length, 1, f) == 1 &&
                    fputs(cases[i].header, f) >= 0);
        fclose(f);
        write_run();
        snprintf(load, sizeof load, "--load_path=%s", folder);
        assert_false(try_printed(said, sizeof said, 2, 1, load, NULL));
        try_contains(said, cases[i].text);
        try_contains(said, "adapter_config.json: ");
    }
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
