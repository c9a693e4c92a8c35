/* Adding a kind of unit takes one file, mapping_unit.h. Its model is planned, trained, saved and
 * loaded like other models. test_gradients.c checks its gradients, test_fsdp_ranks.c its sharding.
 * Also tests the names of a second kind of layer with items, expert_unit.h; test_items_ranks.c
 * stores such a layer. */
#include <math.h>

#include "model/checkpoint/safetensors.h"
#include "model/shape/trainable.h"
#include "model/store/param_store_sizes.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/expert_unit.h"
#include "tests/mapping_unit.h"
#include "tests/saved.h"

enum { TOKENS = 32 };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Trainer;

static ModelConfig model_of(bool with_mapping)
{
    ModelConfig m = architecture(LLAMA);
    m.architecture = with_mapping ? &mapped : NULL;
    return m;
}

static void open_to(Trainer *t, const ModelConfig *m, const char *recipe, bool evaluate)
{
    *t = (Trainer){ 0 };
    model_config(&t->config, m, recipe, 2);
    t->config.eval_only = evaluate;
    t->config.text = "run_name: test\n";
    model_create(&t->model, &t->store, &t->config);
    store_init(&t->store, &t->config.model, 5);
}

static void open_trainer(Trainer *t, const ModelConfig *m, const char *recipe)
{
    open_to(t, m, recipe, false);
}

/* Returns the summed loss of a micro-batch, and the gradients. */
static double pass(Trainer *t)
{
    int tokens[TOKENS], targets[TOKENS];
    for (int n = 0; n < TOKENS; n++)
        tokens[n] = test_token(1, (uint64_t)n, t->config.model.vocab_size);
    for (int n = 0; n < TOKENS; n++)
        targets[n] = n % 16 == 15 ? -1 : tokens[n + 1];
    if (!t->config.eval_only)
        fsdp_empty_grads(&t->store);
    model_micro_batch(&t->model, &t->store, tokens, targets, NULL, 1.0f / 30, 0,
                      t->config.eval_only ? PASS_FORWARD : PASS_COMPLETE);
    return take_losses(&t->model).loss;
}

static double train_step(Trainer *t, int step)
{
    const double loss = pass(t), norm = optimizer_grad_norm(&t->store);
    optimizer_step(&t->store, &t->config, step, 1e-2, fmin(1, 1 / norm));
    return loss;
}

TEST(test_names)
{
    const ModelConfig plain = model_of(false), m = model_of(true);
    static const char *const names[] = { "the embedding", "the mapping", "block 0", "block 1",
                                         "the head" };
    assert_int_equal(unit_count(&m), 5);
    char name[UNIT_NAME];
    for (int u = 0; u < 5; u++)
        assert_string_equal(unit_name(&m, u, name), names[u]);
    assert_int_equal(unit_of_layer(&m, 1), 3);
    assert_int_equal(unit_of_head_matrix(&m), 4);
    assert_int_equal(unit_count(&plain), 4);
    assert_string_equal(unit_name(&plain, 1, name), "block 0");
}

/* Returns a parameter as it is stored, on one rank. */
static Tensor stored(const ParamStore *store, int u, int param)
{
    const Param *p = &store->shape[u].param[param];
    return shard_weights(&store->shard[u], p, 0, param_numel(p));
}

static void copy_unit(const Trainer *to, int u, const Trainer *from, int v)
{
    for (int i = 0; i < from->store.shape[v].num_params; i++)
        device_copy(stored(&to->store, u, i).data, stored(&from->store, v, i).data,
                    tensor_bytes(stored(&from->store, v, i)));
}

static void check_same_grads(const Trainer *a, int u, const Trainer *b, int v)
{
    const size_t n = tensor_bytes(a->store.shard[u].grad);
    void *x = keep(n), *y = keep(n);
    device_get(x, a->store.shard[u].grad.data, n);
    device_get(y, b->store.shard[v].grad.data, n);
    assert_memory_equal(x, y, n);
}

/* If W = 0, the losses and the gradients of all other units have the bits of a model without the
 * unit. */
TEST(test_identity)
{
    static const char *const recipes[] = { "f32", "bf16", "coat", "coat-lean" };
    for (int r = 0; r < 4; r++) {
        const ModelConfig plain = model_of(false), m = model_of(true);
        Trainer a, b;
        open_trainer(&a, &plain, recipes[r]);
        open_trainer(&b, &m, recipes[r]);
        for (int u = 0; u < 4; u++)
            copy_unit(&b, u ? u + 1 : 0, &a, u);
        device_zero(stored(&b.store, 1, 0).data, tensor_bytes(stored(&b.store, 1, 0)));
        store_loaded(&b.store);
        const double expected = pass(&a), loss = pass(&b);
        assert_memory_equal(&loss, &expected, sizeof loss);
        for (int u = 0; u < 4; u++)
            check_same_grads(&b, u ? u + 1 : 0, &a, u);
        model_free(&a.model, &a.store);
        model_free(&b.model, &b.store);
    }
}

TEST(test_saved)
{
    const ModelConfig m = model_of(true);
    Trainer t, loaded;
    open_trainer(&t, &m, "coat");
    t.config.save_folder = strdup(text("%s/mapped", root));
    t.config.save_num_checkpoints_to_keep = -1;
    mkdir(t.config.save_folder, 0777);
    const double first = train_step(&t, 1);
    assert_true(train_step(&t, 2) < first);
    const TrainState s = state_of(2);
    checkpoint_begin(&t.config, &t.store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
    const char *folder = text("%s/mapped/step2", root);
    SafeFile *file = safetensors_open(text("%s/model.safetensors", folder));
    const SafeTensor *w = safetensors_find(file, "model.mapping.weight");
    assert_true(w && w->shape[0] == 64 && w->shape[1] == 64);
    safetensors_close(file);

    open_trainer(&loaded, &m, "coat");
    TrainState back;
    assert_true(checkpoint_load(folder, &loaded.config, &loaded.store, &back, true));
    const double next = train_step(&t, 3), same = train_step(&loaded, 3);
    assert_memory_equal(&next, &same, sizeof next);
    free(t.config.save_folder);
    model_free(&t.model, &t.store);
    model_free(&loaded.model, &loaded.store);
}

/* If only this unit is trained, backward ends there. */
TEST(test_trained_alone)
{
    const ModelConfig m = model_of(true);
    static char *pattern = "model.mapping.weight";
    Trainer t = { 0 };
    model_config(&t.config, &m, "f32", 2);
    t.config.trainable = &pattern;
    t.config.num_trainable = 1;
    model_create(&t.model, &t.store, &t.config);
    store_init(&t.store, &t.config.model, 5);
    assert_int_equal(t.store.first_trained, 1);
    const double first = train_step(&t, 1);
    assert_true(train_step(&t, 2) < first);
    model_free(&t.model, &t.store);
}

/* A layer of another kind, and the items of its parameters. */
TEST(test_names_of_items)
{
    const ModelConfig m = expert_model(BASE_E4M3), plain = architecture(LLAMA);
    char name[UNIT_NAME];
    assert_int_equal(unit_count(&plain), plain.n_layers + 2);
    assert_int_equal(unit_count(&m), m.n_layers + 2);
    assert_string_equal(unit_name(&m, LAYER, name), "expert layer 0");
    assert_string_equal(unit_name(&m, LAYER + 1, name), "block 1");
    assert_int_equal(unit_of_layer(&m, 2), 3);
    int count, found = 0;
    HfTensor *tensor = hf_tensors_of(&m, &count);
    NameIndex names = { 0 };
    for (int i = 0; i < count; i++)
        name_index_add(&names, tensor[i].name, i);
    name_index_sort(&names);
    for (int i = 0; i < count; i++)
        assert_int_equal(name_index_find(&names, tensor[i].name), i); /* no name occurs twice */
    for (int i = 0; i < ITEMS; i++)
        for (int k = 0; k < 6; k++, found++) {
            static const char *const part[] = { "gate", "up" }, *const matrix[] = { "", ".lora_A",
                                                                                    ".lora_B" };
            const int at = name_index_find(
                &names, text("%smodel.layers.0.experts.%d.%s_proj%s.weight",
                             k / 2 ? "base_model.model." : "", i, part[k % 2], matrix[k / 2]));
            assert_true(at >= 0);
            assert_int_equal(tensor[at].rows, k / 2 == 1 ? RANK : m.mlp_width);
            assert_int_equal(tensor[at].cols, k / 2 == 2 ? RANK : m.d_model);
            assert_true(tensor[at].joined == (i > 0 || k % 2 == 1));
        }
    for (int i = 0; i < count; i++)
        found -= tensor[i].unit == LAYER;
    assert_int_equal(found, 0);
    name_index_free(&names);
    free(tensor);
}

/* The same layer above the blocks. */
static bool is_above;

static int layers_below(const ModelConfig *c)
{
    return is_above ? 0 : layers_with_experts(c);
}

static int layers_above(const ModelConfig *c)
{
    return is_above ? layers_with_experts(c) : 0;
}

/* With that layer below or above its blocks, a model has the bits of the model without the
 * layer. */
TEST(test_second_kind_of_layer)
{
    static const char *const recipes[] = { "f32", "bf16", "coat", "coat-lean" };
    for (int i = 0; i < 16; i++) {
        const int at = i % 2 ? 3 : LAYER;
        const char *recipe = recipes[i / 2 % 4];
        const bool evaluate = i / 8;
        is_above = i % 2;
        const ModelConfig m = expert_model(BASE_AS_FROZEN);
        ModelConfig plain = m;
        plain.architecture = NULL;
        plain.n_layers = m.n_layers - 1;
        Trainer a, b;
        open_to(&a, &plain, recipe, evaluate);
        open_to(&b, &m, recipe, evaluate);
        for (int u = 0; u < 4; u++)
            copy_unit(&b, u < at ? u : u + 1, &a, u);
        store_loaded(&b.store);
        const double expected = pass(&a), loss = pass(&b);
        assert_memory_equal(&loss, &expected, sizeof loss);
        for (int u = 0; u < 4 && !evaluate; u++)
            check_same_grads(&b, u < at ? u : u + 1, &a, u);
        model_free(&a.model, &a.store);
        model_free(&b.model, &b.store);
    }
    is_above = false;
}

/* Items are trained together. */
TEST(test_items_trained_together)
{
    static char *pattern = "model.layers.0.experts.2.*";
    ModelConfig m = expert_model(BASE_AS_FROZEN);
    Config c = { 0 };
    int count;
    model_config(&c, &m, "f32", 1);
    c.trainable = &pattern;
    c.num_trainable = 1;
    HfTensor *tensor = hf_tensors_of(&m, &count);
    char *split = trainable_split(&c, tensor, count);
    assert_string_equal(split, "model.layers.0.experts.1.up_proj.weight is frozen and "
                               "model.layers.0.experts.2.gate_proj.weight is trained");
    free(split);
    free(tensor);
}

/* Items with gaps between them are refused. */
TEST(test_sizes_of_items)
{
    ModelConfig m = expert_model(BASE_AS_FROZEN);
    m.mlp_width = 80, m.d_model = 20;
    UnitLayout s;
    unit_shape(&s, &m, LAYER, 1);
    DIES("expert layer 0: each of 5 experts has 160 x 20 numbers; expected a multiple of 256",
         unit_check_size(&s, LAYER));
    free(s.param);
}

int main(void)
{
    device_init(0);
    architecture_add(&mapped);
    unit_kind_add(&mapping_kind, 1);
    architecture_add(&with_experts);
    UnitKind below = expert_layer, above = expert_layer;
    below.count = layers_below;
    above.count = layers_above;
    unit_kind_add(&below, 1);
    unit_kind_add(&above, 5); /* after the block */
    return run_all_tests(make_root, remove_root);
}
