/* Folders of LlavaForConditionalGeneration are read, trained, saved, resumed and exported. Parts of
 * a transformers folder that the program does not compute with, the tower and its description, are
 * written unchanged. test_parity.c compares the computed results. */
#include "model/config/export_options.h"
#include "model/formats/adapter.h"
#include "model/formats/hf.h"
#include "tests/test.h"
#include "tests/saved.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/tower.h"
#include "model/update/update.h"
#include "tests/exported.h"

static const char *const goldens[] = { "llava-llama", "llava-mistral", "llava-qwen3-tied" };
enum { GOLDENS = 3, T = 16, N = 2 * T };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    float features[N][64];
    const void *rows[N];
    int tokens[N], targets[N];
} Trainer;

/* A path that is valid until release(). */
static const char *path_of(const char *text)
{
    return strcpy(keep(strlen(text) + 1), text);
}

static void fill_batch(Trainer *t)
{
    const ImageConfig *i = &t->config.model.image;
    assert_in_range(i->feature_size, 1, 64);
    for (int n = 0; n < N; n++) {
        const bool image = n >= 3 && n < 3 + i->rows;
        t->tokens[n] = image ? i->token_id : test_token(1, (uint64_t)n, 90);
        for (int c = 0; c < 64; c++)
            t->features[n][c] = test_uniform(2, (uint64_t)(n * 64 + c));
        t->rows[n] = image ? t->features[n] : NULL;
    }
    for (int n = 0; n < N; n++)
        t->targets[n] = n % T == T - 1 || t->rows[n + 1] ? -1 : t->tokens[n + 1];
}

/* Opens a run, with adapters on `base` unless `base` is NULL; with the adapters of `folder` if it
 * has some. */
static void open_adapted(Trainer *t, const char *folder, const char *base, BaseFormat stored)
{
    *t = (Trainer){ 0 };
    ModelConfig m = { .init_std = 0.02 };
    double dropout;
    hf_read(&m, base ? base : folder);
    m.max_sequence_length = T;
    if (base)
        m.lora = (Lora){ .rank = 2,
                         .alpha = 4,
                         .base = stored,
                         .base_path = (char *)base,
                         .projector = true,
                         .target = { [LORA_Q] = true, [LORA_DOWN] = true } };
    if (adapter_is(folder)) {
        m.lora.projector = false;
        adapter_read(&m.lora, &dropout, folder, &m);
    }
    model_config(&t->config, &m, "f32", 2);
    t->config.text = "run_name: test\n";
    t->config.save_folder = keep(256);
    t->config.save_num_checkpoints_to_keep = -1;
    snprintf(t->config.save_folder, 256, "%s/run%d", root, num_folders++);
    mkdir(t->config.save_folder, 0777);
    model_create(&t->model, &t->store, &t->config);
    fill_batch(t);
}

static void open_trainer(Trainer *t, const char *folder)
{
    open_adapted(t, folder, NULL, BASE_AS_FROZEN);
}

static double train_step(Trainer *t, int step)
{
    fsdp_empty_grads(&t->store);
    model_use_images(&t->model, (ImageRows){ t->rows, F32 });
    model_micro_batch(&t->model, &t->store, t->tokens, t->targets, NULL, 1.0f / N, 0,
                      PASS_COMPLETE);
    const double loss = take_losses(&t->model).loss, norm = optimizer_grad_norm(&t->store);
    optimizer_step(&t->store, &t->config, step, 1e-2, fmin(1, 1 / norm));
    return loss;
}

static const char *save_at(Trainer *t, long step)
{
    const TrainState s = state_of(step);
    checkpoint_begin(&t->config, &t->store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
    return path_of(text("%s/step%ld", t->config.save_folder, step));
}

static void close_trainer(Trainer *t)
{
    model_free(&t->model, &t->store);
}

/* A copy of the golden folder that can be deleted. */
static const char *copied(const char *name)
{
    const char *folder = path_of(text("%s/%s-%d", root, name, num_folders++));
    shell(text("mkdir %s && cp tests/golden/%s/*.json tests/golden/%s/model.safetensors %s", folder,
               name, name, folder));
    return folder;
}

/* Every tensor of the golden folder whose name begins with `prefix` is in the file that the index
 * of `folder` names, with the same bytes. */
static void check_tensors(const char *name, const char *folder, const char *prefix)
{
    SafeFile *was = safetensors_open(text("tests/golden/%s/model.safetensors", name));
    json_t *index = json_load_file(text("%s/model.safetensors.index.json", folder), 0, NULL);
    int checked = 0;
    assert_non_null(index);
    for (int i = 0; i < was->count; i++) {
        const SafeTensor *a = &was->tensor[i];
        const size_t bytes = a->end - a->begin;
        if (strncmp(a->name, prefix, strlen(prefix)) != 0)
            continue;
        const char *file =
            json_string_value(json_object_get(json_object_get(index, "weight_map"), a->name));
        assert_non_null(file);
        SafeFile *now = safetensors_open(text("%s/%s", folder, file));
        const SafeTensor *b = safetensors_find(now, a->name);
        char *x = keep(bytes), *y = keep(bytes);
        assert_true(b && b->end - b->begin == bytes && strcmp(a->dtype, b->dtype) == 0 &&
                    a->dims == b->dims);
        safetensors_read(was, x, a, 0, bytes);
        safetensors_read(now, y, b, 0, bytes);
        assert_memory_equal(x, y, bytes);
        safetensors_close(now);
        checked++;
    }
    assert_true(checked > 5);
    json_decref(index);
    safetensors_close(was);
}

static void check_config(const char *name, const char *folder)
{
    static const char *const keys[] = { "architectures",     "model_type",
                                        "vision_config",     "vision_feature_layer",
                                        "image_token_index", "vision_feature_select_strategy",
                                        "image_seq_length",  "multimodal_projector_bias" };
    json_t *was = json_load_file(text("tests/golden/%s/config.json", name), 0, NULL);
    json_t *now = json_load_file(text("%s/config.json", folder), 0, NULL);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!json_equal(json_object_get(was, keys[i]), json_object_get(now, keys[i])))
            fail_msg("%s: %s changed", name, keys[i]);
    const json_t *text_was = json_object_get(was, "text_config"),
                 *text_now = json_object_get(now, "text_config");
    assert_true(json_equal(json_object_get(text_was, "model_type"),
                           json_object_get(text_now, "model_type")));
    assert_true(json_equal(json_object_get(text_was, "hidden_size"),
                           json_object_get(text_now, "hidden_size")));
    json_decref(was);
    json_decref(now);
}

/* After loading and saving, all tensors are the same. After two steps of training, the tower is the
 * same. A resume in the middle has the same bits, even if the first folder is gone. */
TEST(test_round_trip)
{
    for (int g = 0; g < GOLDENS; g++) {
        Trainer t, again;
        const char *start = copied(goldens[g]);
        open_trainer(&t, start);
        assert_false(checkpoint_load(start, &t.config, &t.store, NULL, true));
        shell(text("rm -r %s", start));
        const char *same = save_at(&t, 1);
        check_tensors(goldens[g], same, "");
        check_config(goldens[g], same);
        const double first = train_step(&t, 1);
        const char *trained = save_at(&t, 2);
        check_tensors(goldens[g], trained, "vision_tower.");
        open_trainer(&again, trained);
        TrainState s;
        assert_true(checkpoint_load(trained, &again.config, &again.store, &s, true));
        const double second = train_step(&t, 2), resumed = train_step(&again, 2);
        assert_memory_equal(&second, &resumed, sizeof second);
        assert_true(second < first);
        check_tensors(goldens[g], save_at(&again, 3), "vision_tower.");
        close_trainer(&t);
        close_trainer(&again);
        release();
    }
}

static void check_adapter_folder(const char *folder)
{
    json_t *j = json_load_file(text("%s/adapter_config.json", folder), 0, NULL);
    json_t *expected = json_pack("[s]", "multi_modal_projector");
    assert_true(json_equal(json_object_get(j, "modules_to_save"), expected));
    assert_string_equal(json_string_value(json_object_get(j, "target_modules")),
                        ".*language_model.*\\.(q_proj|down_proj)");
    SafeFile *f = safetensors_open(text("%s/adapter_model.safetensors", folder));
    const SafeTensor *t =
        safetensors_find(f, "base_model.model.model.multi_modal_projector.linear_1.bias");
    assert_true(t && t->dims == 1);
    assert_non_null(
        safetensors_find(f, "base_model.model.model.multi_modal_projector.linear_2.weight"));
    assert_non_null(safetensors_find(
        f, "base_model.model.model.language_model.layers.1.mlp.down_proj.lora_B.weight"));
    assert_int_equal(f->count, 4 + 2 * 2 * 2);
    safetensors_close(f);
    shell(text("! ls %s | grep -q 'model-\\|index\\|^config.json'", folder));
    json_decref(expected);
    json_decref(j);
}

/* Adapters and the projector, saved next to each other: a resume has the same bits, also on a base
 * in NF4. The merged folder computes the same as the adapters, and has the trained projector. */
TEST(test_adapters)
{
    for (BaseFormat stored = BASE_AS_FROZEN; stored <= BASE_NF4; stored++) {
        Trainer t, again, merged;
        const char *base = "tests/golden/llava-llama";
        TrainState s;
        open_adapted(&t, base, base, stored);
        assert_false(checkpoint_load(base, &t.config, &t.store, NULL, true));
        const double first = train_step(&t, 1);
        const char *folder = save_at(&t, 1);
        check_adapter_folder(folder);
        open_adapted(&again, folder, base, stored);
        assert_true(again.config.model.lora.projector);
        assert_true(checkpoint_load(folder, &again.config, &again.store, &s, true));
        const double second = train_step(&t, 2), resumed = train_step(&again, 2);
        assert_memory_equal(&second, &resumed, sizeof second);
        assert_true(second < first);
        if (stored == BASE_AS_FROZEN) {
            const char *target = path_of(text("%s/merged", root));
            export_folder(folder, NULL, target, "F32", CHECKPOINT_FILE_BYTES);
            check_tensors("llava-llama", target, "vision_tower.");
            open_trainer(&merged, target);
            checkpoint_load(target, &merged.config, &merged.store, NULL, true);
            const double same = train_step(&merged, 2);
            assert_true(fabs(same - second) <= 1e-5 * second);
            close_trainer(&merged);
        }
        close_trainer(&t);
        close_trainer(&again);
        release();
    }
}

TEST(test_export)
{
    for (int g = 0; g < GOLDENS; g++) {
        const char *source = path_of(text("tests/golden/%s", goldens[g])),
                   *target = path_of(text("%s/exported-%d", root, g));
        export_folder(source, NULL, target, "F32", CHECKPOINT_FILE_BYTES);
        check_tensors(goldens[g], target, "");
        check_config(goldens[g], target);
        const char *half = path_of(text("%s/half-%d", root, g));
        export_folder(source, NULL, half, "BF16", CHECKPOINT_FILE_BYTES);
        check_tensors(goldens[g], half, "vision_tower.");
        release();
    }
}

static uint64_t fingerprint_in(const char *folder)
{
    WeightFiles s = weight_files_open(folder);
    const uint64_t fingerprint = tower_fingerprint(&s);
    weight_files_close(&s);
    return fingerprint;
}

/* The hashes that scripts/make_image_features.py computes of the golden folders. Saved and exported
 * folders have the same hashes. */
TEST(test_samples)
{
    static const uint64_t known[GOLDENS] = { 0x939f26f8c251187f, 0x30b1e64c9a771979,
                                             0xca75c6486f6ab463 };
    for (int g = 0; g < GOLDENS; g++) {
        const char *source = path_of(text("tests/golden/%s", goldens[g])),
                   *target = path_of(text("%s/sampled-%d", root, g));
        export_folder(source, NULL, target, "BF16", CHECKPOINT_FILE_BYTES);
        assert_true(fingerprint_in(source) == known[g] && fingerprint_in(target) == known[g]);
        release();
    }
    assert_true(fingerprint_in("tests/golden/llama") == 0);
}

static double loss_from(const char *folder)
{
    Trainer t;
    open_trainer(&t, folder);
    checkpoint_load(folder, &t.config, &t.store, NULL, true);
    const double loss = train_step(&t, 1);
    close_trainer(&t);
    return loss;
}

/* Only the language model is stored as codes, as config.json says. The folder computes the same as
 * its export to F32. scripts/reference.py formats tests that transformers reads such folders. */
TEST(test_coded)
{
    static const struct {
        const char *dtype, *list, *first;
        int count;
    } cases[] = {
        { "fp8", "ignore", "re:.*lm_head", 3 },
        { "int8", "ignore", "re:.*lm_head", 3 },
        { "nf4", "llm_int8_skip_modules", "lm_head", 5 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *coded = path_of(text("%s/coded-%zu", root, i)),
                   *plain = path_of(text("%s/plain-%zu", root, i));
        export_folder("tests/golden/llava-llama", NULL, coded, cases[i].dtype,
                      CHECKPOINT_FILE_BYTES);
        export_folder(coded, NULL, plain, "F32", CHECKPOINT_FILE_BYTES);
        check_tensors("llava-llama", coded, "vision_tower.");
        json_t *j = json_load_file(text("%s/config.json", coded), 0, NULL);
        const json_t *list =
            json_object_get(json_object_get(j, "quantization_config"), cases[i].list);
        assert_int_equal(json_array_size(list), cases[i].count);
        assert_string_equal(json_string_value(json_array_get(list, 0)), cases[i].first);
        json_decref(j);
        SafeFile *f = safetensors_open(text("%s/model-00001-of-00001.safetensors", coded));
        assert_string_equal(safetensors_find(f, "multi_modal_projector.linear_1.weight")->dtype,
                            "BF16");
        assert_string_equal(safetensors_find(f, "language_model.lm_head.weight")->dtype, "BF16");
        safetensors_close(f);
        const double loss = loss_from(coded), expected = loss_from(plain);
        assert_memory_equal(&loss, &expected, sizeof loss);
        release();
    }
    ExportOptions o =
        export_options_of("tests/golden/llava-llama", NULL, path_of(text("%s/none", root)), "fp8");
    o.num_calibration = 1;
    DIES("--calibration: tests/golden/llava-llama is a model with images, and calibration does not "
         "read images",
         export_open(&o));
}

/* ---- config.json ----------------------------------------------------------------------------- */

static ModelConfig read_json(const char *json)
{
    const char *folder = text("%s/config", root);
    mkdir(folder, 0777);
    FILE *f = fopen(text("%s/config.json", folder), "w");
    assert_non_null(f);
    fputs(json, f);
    fclose(f);
    ModelConfig m = { .init_std = 0.02 };
    hf_read(&m, folder);
    return m;
}

#define LLAVA(more) \
    "{\"architectures\": [\"LlavaForConditionalGeneration\"], \"model_type\": \"llava\"" more "}"

/* The folder of LLaVA-1.5-7B: most keys have the defaults of their classes. */
TEST(test_defaults)
{
    const ModelConfig m = read_json(LLAVA(
        ", \"image_token_index\": 32000, \"pad_token_id\": 32001, \"vision_feature_layer\": -2, "
        "\"text_config\": {\"architectures\": [\"LlamaForCausalLM\"], \"max_position_embeddings\": "
        "4096, "
        "\"model_type\": \"llama\", \"rms_norm_eps\": 1e-05, \"torch_dtype\": \"float16\", "
        "\"vocab_size\": 32064}, "
        "\"vision_config\": {\"hidden_size\": 1024, \"image_size\": 336, \"intermediate_size\": "
        "4096, \"model_type\": \"clip_vision_model\", \"num_attention_heads\": 16, "
        "\"num_hidden_layers\": 24, \"patch_size\": 14, \"projection_dim\": 768, \"vocab_size\": "
        "32000}"));
    assert_int_equal(m.d_model, 4096);
    assert_int_equal(m.mlp_width, 11008);
    assert_int_equal(m.n_layers, 32);
    assert_int_equal(m.n_kv_heads, 32);
    assert_int_equal(m.vocab_size, 32064);
    assert_int_equal(m.pad_token_id, 32001);
    assert_int_equal(m.image.rows, 576);
    assert_int_equal(m.image.feature_size, 1024);
    assert_int_equal(m.image.token_id, 32000);
    assert_true(m.image.bias && m.image.projector == PROJECTOR_MLP && m.norm.eps == 1e-5f &&
                !m.weight_tying);

    const ModelConfig siglip =
        read_json(LLAVA(", \"image_token_id\": 7, \"vision_feature_select_strategy\": \"full\", "
                        "\"text_config\": {\"model_type\": \"mistral\"}, "
                        "\"vision_config\": {\"model_type\": \"siglip_vision_model\", "
                        "\"hidden_size\": 1152, \"image_size\": 384, "
                        "\"patch_size\": 14}"));
    assert_int_equal(siglip.image.rows, 729);
    assert_int_equal(siglip.image.token_id, 7);
    assert_int_equal(siglip.mlp_width, 14336);
    assert_int_equal(siglip.n_kv_heads, 8);

    const ModelConfig pixels =
        read_json(LLAVA(", \"image_feature_size\": 768, \"image_seq_length\": 64, "
                        "\"multimodal_projector_bias\": false, "
                        "\"projector\": \"linear\""));
    assert_int_equal(pixels.image.rows, 64);
    assert_true(!pixels.image.bias && pixels.image.projector == PROJECTOR_LINEAR);

    const ModelConfig plain = architecture(LLAMA);
    json_t *j = hf_config(&plain, F32);
    assert_null(json_object_get(j, "text_config"));
    json_decref(j);
}

#define TOWER ", \"vision_config\": {\"model_type\": \"clip_vision_model\"}"

TEST(test_refused)
{
    DIES("config.json: text_config is of model_type qwen2; in a LlavaForConditionalGeneration only "
         "llama, mistral and qwen3",
         read_json(LLAVA(", \"text_config\": {\"model_type\": \"qwen2\"}" TOWER)));
    DIES("config.json: vision_feature_layer is a list",
         read_json(LLAVA(TOWER ", \"vision_feature_layer\": [-2, -5]")));
    DIES("config.json: vision_config is of model_type pixtral",
         read_json(LLAVA(", \"vision_config\": {\"model_type\": \"pixtral\"}")));
    DIES("config.json: projector_hidden_act is relu",
         read_json(LLAVA(TOWER ", \"projector_hidden_act\": \"relu\"")));
    DIES("config.json: vision_feature_select_strategy is cls",
         read_json(LLAVA(TOWER ", \"vision_feature_select_strategy\": \"cls\"")));
    DIES("there is neither a vision_config nor image_feature_size", read_json(LLAVA("")));
    DIES("config.json: image_token_index: expected a number, found",
         read_json(LLAVA(TOWER ", \"image_token_index\": \"<image>\"")));
}

/* Writes a file of adapters with one tensor of zeros. The file names modules by a list, which in
 * PEFT also matches modules of the tower. */
static const char *adapters_of(const char *tensor, const char *saved)
{
    const char *folder = path_of(text("%s/adapters-%d", root, num_folders++));
    const size_t shape[2] = { 2, 24 };
    mkdir(folder, 0777);
    FILE *f = fopen(text("%s/adapter_config.json", folder), "w");
    assert_non_null(f);
    fprintf(
        f,
        "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"q_proj\"], "
        "\"modules_to_save\": %s, \"base_model_name_or_path\": \"tests/golden/llava-llama\"}",
        saved);
    fclose(f);
    SafeFile *to = safetensors_new(text("%s/adapter_model.safetensors", folder));
    safetensors_add(to, tensor, "F32", 2, shape);
    safetensors_lay_out(to);
    safetensors_create(to);
    safetensors_close(to);
    return folder;
}

/* A copy of PEFT's golden folder with the names that transformers before 4.52 had. */
static const char *older(const char *golden)
{
    const char *folder = path_of(text("%s/older-%d", root, num_folders++));
    shell(text("mkdir %s && cp %s/adapter_config.json %s", folder, golden, folder));
    SafeFile *from = safetensors_open(text("%s/adapter_model.safetensors", golden));
    SafeFile *to = safetensors_new(text("%s/adapter_model.safetensors", folder));
    const char *names[64];
    assert_in_range(from->count, 1, 64);
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        const char *rest = t->name + strlen("base_model.model.model."),
                   *text_model = "language_model.";
        const bool low = strncmp(rest, text_model, strlen(text_model)) == 0;
        names[i] = path_of(
            low ? text("base_model.model.language_model.model.%s", rest + strlen(text_model))
                : text("base_model.model.%s", rest));
        safetensors_add(to, names[i], t->dtype, t->dims, t->shape);
    }
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < from->count; i++) {
        const SafeTensor *t = &from->tensor[i];
        char *bytes = keep(t->end - t->begin);
        safetensors_read(from, bytes, t, 0, t->end - t->begin);
        assert_true(
            safetensors_write(to, safetensors_find(to, names[i]), 0, bytes, t->end - t->begin));
    }
    safetensors_close(from);
    safetensors_close(to);
    return folder;
}

TEST(test_older_names)
{
    const char *const golden = "tests/golden/lora/llava-llama", *const folders[] = {
        golden, older(golden)
    };
    double loss[2];
    for (int i = 0; i < 2; i++) {
        Trainer t;
        open_adapted(&t, folders[i], "tests/golden/llava-llama", BASE_AS_FROZEN);
        assert_true(t.config.model.lora.rank == 4 && t.config.model.lora.projector &&
                    t.config.model.lora.target[LORA_UP]);
        checkpoint_load(folders[i], &t.config, &t.store, NULL, true);
        loss[i] = train_step(&t, 1);
        close_trainer(&t);
    }
    assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    release();
}

/* Folders that do not fit the model: adapters of the tower, a projector that is missing or
 * unexpected, other tokens. */
TEST(test_unfit)
{
    static const char base[] = "tests/golden/llava-llama",
                      projector[] = "[\"multi_modal_projector\"]";
    const struct {
        const char *tensor, *saved, *text;
    } cases[] = {
        { "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight",
          "null", "is an adapter of the vision tower, which is frozen here" },
        { "base_model.model.model.multi_modal_projector.linear_1.weight", "null",
          "has no place in the configured model" },
        { "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
          projector, "there is no tensor" },
    };
    /* Adapters get initial values on the device before their files are compared, and CUDA does not
     * work in the child process of DIES. */
    const int count = strcmp(device_build(), "cpu") == 0 ? 3 : 0;
    for (int i = 0; i < count; i++) {
        Trainer t;
        const char *folder = adapters_of(cases[i].tensor, cases[i].saved);
        open_adapted(&t, folder, base, BASE_AS_FROZEN);
        DIES(cases[i].text, checkpoint_load(folder, &t.config, &t.store, NULL, true));
        close_trainer(&t);
    }
    Trainer t;
    open_trainer(&t, base);
    t.config.model.image.token_id--;
    DIES("image_token_index is 98, but model.image_token_id is 97",
         checkpoint_load(base, &t.config, &t.store, NULL, true));
    t.config.model.image.token_id++;
    t.config.model.image.rows++;
    DIES("number of tokens of an image is 4, but model.image_tokens is 5",
         checkpoint_load(base, &t.config, &t.store, NULL, true));
    close_trainer(&t);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
