/* Adds an architecture, which takes one file: a class whose names, tensors and features no class of
 * transformers combines. The class is trained, saved and loaded like built-in ones. Further tests
 * check which class is found for a model. */
#include <jansson.h>
#include <math.h>

#include "model/formats/hf.h"
#include "model/shape/architecture.h"
#include "model/checkpoint/safetensors.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/saved.h"

/* ---- the class ------------------------------------------------------------------------------- */

/* Norms before the branches, but QK-norm over the full widths; a clip and a window; gate and up are
 * one matrix. */
// clang-format off
static const TensorNames made_up_tensors[] = {
    { "embed",   { "wte" } },
    { "attn_norm",   { "ln_1" } },
    { "qkv",     { "attn.query", "attn.key", "attn.value" } },
    { "qnorm",   { "attn.query_norm" } },
    { "knorm",   { "attn.key_norm" } },
    { "out",     { "attn.project" } },
    { "mlp_norm",   { "ln_2" } },
    { "gate_up", { "mlp.both" } },
    { "down",    { "mlp.project" } },
    { "norm",    { "ln_f" } },
    { "head",    { "output" } },
    { NULL }
};
// clang-format on
static const Architecture made_up = {
    "MadeUpForCausalLM",
    "made_up",
    "Made Up",
    .norm = RMS_NORM,
    .norm_affine = true,
    .qk_norm = QK_NORM_WIDTH,
    .clip = true,
    .windows = SAME_WINDOW,
    .rope_types = 1 << ROPE_DEFAULT,
    .blocks = "h",
    .tensors = made_up_tensors,
    .keys = (const ClassKey[]){ { "rms_norm_eps", 1e-3 },
                                { "sliding_window", 5 },
                                { "clip_qkv", 0 },
                                { "num_key_value_heads", 1 },
                                { NULL } },
};

static const char *const expected_names[] = {
    "wte",
    "h.0.ln_1",
    "h.0.attn.query",
    "h.0.attn.key",
    "h.0.attn.value",
    "h.0.attn.query_norm",
    "h.0.attn.key_norm",
    "h.0.attn.project",
    "h.0.ln_2",
    "h.0.mlp.both",
    "h.0.mlp.project",
    "h.1.ln_1",
    "h.1.attn.query",
    "h.1.attn.key",
    "h.1.attn.value",
    "h.1.attn.query_norm",
    "h.1.attn.key_norm",
    "h.1.attn.project",
    "h.1.ln_2",
    "h.1.mlp.both",
    "h.1.mlp.project",
    "ln_f",
    "output",
};
enum { NAMES = sizeof expected_names / sizeof expected_names[0] };

static ModelConfig made_up_model(void)
{
    ModelConfig m = architecture(LLAMA);
    m.norm.eps = 1e-3f;
    m.clip_qkv = 3;
    m.qk_norm = QK_NORM_WIDTH;
    m.sliding_window = 5;
    m.n_kv_heads = 1;
    return m;
}

/* ---- its training ---------------------------------------------------------------------------- */

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Trainer;

static void open_trainer(Trainer *t, const ModelConfig *m, const char *folder)
{
    model_config(&t->config, m, "f32", 2);
    t->config.text = "run_name: test\n";
    t->config.save_folder = strdup(folder);
    t->config.save_num_checkpoints_to_keep = -1;
    mkdir(folder, 0777);
    model_create(&t->model, &t->store, &t->config);
    store_init(&t->store, &t->config.model, 5);
}

static double train_step(Trainer *t, int step)
{
    int tokens[32], targets[32];
    for (int n = 0; n < 32; n++)
        tokens[n] = test_token(1, (uint64_t)n, t->config.model.vocab_size);
    for (int n = 0; n < 32; n++)
        targets[n] = n % 16 == 15 ? -1 : tokens[n + 1];
    fsdp_empty_grads(&t->store);
    model_micro_batch(&t->model, &t->store, tokens, targets, NULL, 1.0f / 30, 0, PASS_COMPLETE);
    const double norm = optimizer_grad_norm(&t->store);
    optimizer_step(&t->store, &t->config, step, 1e-2, fmin(1, 1 / norm));
    return take_losses(&t->model).loss / 30;
}

static void close_trainer(Trainer *t)
{
    free(t->config.save_folder);
    model_free(&t->model, &t->store);
}

static void check_names(const char *folder)
{
    SafeFile *file = safetensors_open(text("%s/model.safetensors", folder));
    assert_int_equal(file->count, NAMES);
    for (int i = 0; i < NAMES; i++)
        if (!safetensors_find(file, expected_names[i]))
            fail_msg("%s: there is no %s", file->path, expected_names[i]);
    const SafeTensor *key = safetensors_find(file, "h.1.attn.key"),
                     *both = safetensors_find(file, "h.1.mlp.both");
    assert_true(key->shape[0] == 16 && key->shape[1] == 64 && both->shape[0] == 192 &&
                both->shape[1] == 64);
    assert_int_equal(safetensors_find(file, "wte")->shape[0], 90);
    safetensors_close(file);
}

TEST(test_made_up)
{
    const ModelConfig m = made_up_model();
    Trainer t, loaded;
    DIES("no Hugging Face architecture can compute this model", architecture_of(&m));
    architecture_add(&made_up);
    DIES("class MadeUpForCausalLM exists already", architecture_add(&made_up));
    assert_ptr_equal(architecture_of(&m), &made_up);
    assert_ptr_equal(architecture_find("MadeUpForCausalLM"), &made_up);

    open_trainer(&t, &m, text("%s/made-up", root));
    const double first = train_step(&t, 1);
    assert_true(train_step(&t, 2) < first);
    const TrainState s = state_of(2);
    checkpoint_begin(&t.config, &t.store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
    const char *folder = text("%s/made-up/step2", root);
    check_names(folder);

    ModelConfig read = { .init_std = m.init_std };
    hf_read(&read, folder);
    assert_ptr_equal(read.architecture, &made_up);
    assert_true(read.norm.eps == 1e-3f && read.clip_qkv == 3 && read.qk_norm == QK_NORM_WIDTH &&
                read.sliding_window == 5);
    open_trainer(&loaded, &read, text("%s/again", root));
    TrainState back;
    assert_true(checkpoint_load(folder, &loaded.config, &loaded.store, &back, true));
    const double next = train_step(&t, 3), same = train_step(&loaded, 3);
    assert_memory_equal(&next, &same, sizeof next);
    close_trainer(&t);
    close_trainer(&loaded);
}

/* ---- which class is found -------------------------------------------------------------------- */

TEST(test_found)
{
    static const char *const classes[NUM_ARCHITECTURES] = {
        "LlamaForCausalLM", "LlamaForCausalLM",   "LlamaForCausalLM", "OlmoForCausalLM",
        "Olmo2ForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Olmo3ForCausalLM",
        "Qwen2ForCausalLM", "SmolLM3ForCausalLM", "OlmoeForCausalLM",
    };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = architecture(a);
        assert_string_equal(architecture_of(&m)->class, classes[a]);
    }
    /* the requested class, if it computes the model */
    ModelConfig m = architecture(LLAMA);
    m.architecture = architecture_find("MistralForCausalLM");
    assert_string_equal(architecture_of(&m)->class, "MistralForCausalLM");
    m.norm_after = true;
    m.qk_norm = QK_NORM_WIDTH;
    assert_string_equal(architecture_of(&m)->class, "Olmo2ForCausalLM");
    /* heads that do not divide the model's width; transformers 5 refuses them in a Llama */
    m = architecture(LLAMA);
    m.n_heads = m.n_kv_heads = 3;
    assert_string_equal(architecture_of(&m)->class, "MistralForCausalLM");
}

TEST(test_differences)
{
    static const struct {
        SmallModel model;
        const char *class, *text;
    } list[] = {
        { LLAMA, "LlamaForCausalLM", "" },
        { LLAMA, "MistralForCausalLM", "" },
        { MISTRAL, "LlamaForCausalLM", "model.sliding_window: null" },
        { QWEN3, "MistralForCausalLM",
          "model.attention_layer_norm: false, model.layer_types: null" },
        { QWEN2, "LlamaForCausalLM", "model.qkv_bias: false" },
        { SMOLLM3, "LlamaForCausalLM", "model.no_rope_layer_interval: null" },
        { LLAMA, "Qwen2ForCausalLM", "model.qkv_bias: true" },
        { OLMO, "LlamaForCausalLM",
          "model.layer_norm_type: rms, model.layer_norm_with_affine: true, model.clip_qkv: null" },
        { OLMO2, "OlmoForCausalLM",
          "model.layer_norm_type: default, model.layer_norm_with_affine: false, "
          "model.layer_norm_eps: 1e-05, model.norm_after: false, model.attention_layer_norm: "
          "false" },
        { OLMO3, "Olmo2ForCausalLM",
          "model.sliding_window: null, model.rope_scaling.full_attn_layers_only: false" },
        { OLMO2, "Olmo3ForCausalLM", "" },
        { LLAMA_GQA, "MadeUpForCausalLM",
          "model.attention_layer_norm: true, model.weight_tying: false, model.rope_scaling: null" },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        const ModelConfig m = architecture(list[i].model);
        char *found = architecture_differences(architecture_find(list[i].class), &m);
        assert_string_equal(found, list[i].text);
        free(found);
    }
}

/* Every parameter has a name and every name has a parameter, for each class and for models of each
 * kind. */
TEST(test_every_parameter)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = architecture(a);
        for (int u = 0; u < unit_count(&m); u++) {
            UnitLayout shape;
            int count;
            unit_shape(&shape, &m, u, 1);
            HfTensor *tensor = hf_tensors(&m, &shape, u, &count);
            size_t named = 0, all = 0;
            for (int i = 0; i < count; i++)
                named += tensor[i].max_rows * tensor[i].cols;
            for (int i = 0; i < shape.num_params; i++)
                all += (size_t)shape.param[i].rows * (size_t)shape.param[i].cols;
            assert_int_equal(named, all);
            free(tensor);
            free(shape.param);
        }
    }
    ModelConfig m = architecture(LLAMA);
    UnitLayout shape;
    int count;
    unit_shape(&shape, &m, 1, 1);
    shape.param[0].name = "norm7";
    DIES("LlamaForCausalLM: no Hugging Face name for parameter norm7",
         hf_tensors(&m, &shape, 1, &count));
    free(shape.param);
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
