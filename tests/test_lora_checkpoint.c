/* Folders of adapters: tensors with PEFT's names, shapes and types, and no tensors of the base;
 * bit-exact round trips; PEFT's folders of every type; folders that do not match. */
#include "model/shape/architecture.h"
#include "model/checkpoint/base_fingerprint.h"
#include "tests/test.h"
#include "tests/adapted.h"
#include "tests/pattern.h"

static const char adapters[] = "adapter_model.safetensors";

/* ---- what is in a folder --------------------------------------------------------------------- */

static void check_tensor(const SafeFile *f, const char *name, const char *dtype, int rows, int cols)
{
    const SafeTensor *t = safetensors_find(f, name);
    if (!t)
        fail_msg("%s has no %s", f->path, name);
    assert_string_equal(t->dtype, dtype);
    assert_true(t->dims == 2 && t->shape[0] == (size_t)rows && t->shape[1] == (size_t)cols);
}

/* Two tensors per matrix, each with `states` states. */
static void check_files(const Run *r, const char *dtype)
{
    const ModelConfig *m = &r->config.model;
    const char *folder = step_folder(r, LAST_STEP);
    int count = 0;
    shell(text("test \"$(ls %s | tr '\\n' ' ')\" = 'adapter_config.json adapter_model.safetensors "
               "config.yaml "
               "optimizer-00001.states trainer.json '",
               folder));
    SafeFile *weights = safetensors_open(text("%s/%s", folder, adapters));
    SafeFile *states = safetensors_open(text("%s/optimizer-00001.states", folder));
    const int rank = m->lora.rank;
    for (int l = 0; l < m->n_layers; l++)
        for (int i = 0; i < num_matrices(m, l); i++) {
            const Adapted k = matrix_of(m, l, i);
            if (!m->lora.target[k.module])
                continue;
            check_tensor(weights, tensor_of(k.path, 'A'), dtype, rank, k.in);
            check_tensor(weights, tensor_of(k.path, 'B'), dtype, k.out, rank);
            check_tensor(states, text("%s.exp_avg", tensor_of(k.path, 'A')), "F32", rank, k.in);
            check_tensor(states, text("%s.exp_avg_sq", tensor_of(k.path, 'B')), "F32", k.out, rank);
            count += 2;
        }
    assert_int_equal(weights->count, count);
    assert_int_equal(states->count, 2 * count);
    safetensors_close(weights);
    safetensors_close(states);
}

static void check_description(const Run *r, const char *base)
{
    Lora l = { 0 };
    double dropout;
    char *found = adapter_base(step_folder(r, LAST_STEP)), *expected = realpath(base, NULL);
    adapter_read(&l, &dropout, step_folder(r, LAST_STEP), &r->config.model);
    assert_int_equal(l.rank, r->config.model.lora.rank);
    assert_true(lora_scale(&l) == 2);
    assert_memory_equal(l.target, r->config.model.lora.target, sizeof l.target);
    assert_string_equal(found, expected);
    free(found);
    free(expected);
}

/* The adapters are in one file, whatever the limit is. */
TEST(test_files)
{
    static const bool some[NUM_LORA_MODULES] = {
        [LORA_Q] = true, [LORA_V] = true, [LORA_UP] = true
    };
    for (SmallModel a = 0; a <= QWEN3_MOE; a++) {
        const bool *target = a % 2 && a < OLMOE ? some : all_modules;
        const char *base = save_base(a),
                   *odd = lasting(text("%s/../%s", base, strrchr(base, '/') + 1));
        Run r;
        open_adapted(&r, a, odd, target, BASE_AS_FROZEN, a % 2 ? "coat-opt" : "f32");
        r.config.recipe.moment1 = r.config.recipe.moment2 = (Format){ F32, 0, false };
        close_run(&r);
        place(&r);
        load(&r, base);
        r.file_limit = 1000;
        save(&r, LAST_STEP);
        shell(text("cd %s && for f in optimizer-*; do test $(stat -c %%s $f) -lt %d || exit 1; "
                   "done; ls | grep -c optimizer | "
                   "grep -qx %d",
                   step_folder(&r, LAST_STEP), a < OLMOE ? 60000 : 400000,
                   r.config.model.n_layers));
        r.file_limit = CHECKPOINT_FILE_BYTES;
        save(&r, LAST_STEP);
        check_files(&r, a % 2 ? "BF16" : "F32");
        check_description(&r, base);
        close_run(&r);
        release();
    }
}

/* ---- round trips ----------------------------------------------------------------------------- */

/* Fills trained tensors, or checks that they are unchanged. Codes of 0 to 63 are finite and
 * positive in every format. */
static void pattern_all(const Run *r, bool check)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Shard *s = &r->store.shard[u];
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        const Tensor part[] = { s->slice[TRAINED].stored, s->state[0], s->state[1] };
        for (int i = 0; i < count * 3; i++) {
            const HfTensor *t = &tensor[i / 3];
            const size_t size = dtype_size(part[i % 3].format.dtype),
                         first = hf_first(&r->store.shape[u], t) * size;
            const size_t n = t->rows * t->cols * size;
            if (!t->adapter)
                continue;
            if (!check)
                pattern_put((char *)part[i % 3].data + first, (uint64_t)(u * 8 + i % 3), first, n);
            else if (pattern_check((char *)part[i % 3].data + first, (uint64_t)(u * 8 + i % 3),
                                   first, n) != n)
                fail_msg("%s, %d: other bytes than were saved", t->name, i % 3);
        }
        free(tensor);
    }
}

/* The frozen tensors equal those of the base, which are F32, as here. */
static void check_frozen(const Run *r, const char *base)
{
    for (int u = 0; u < r->store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            const size_t n = tensor[i].rows * tensor[i].cols;
            if (tensor[i].adapter)
                continue;
            float *found = keep(n * sizeof *found);
            assert_int_equal(r->store.shape[u].param[tensor[i].param].region, FROZEN);
            device_get(found,
                       (float *)r->store.shard[u].slice[FROZEN].stored.data +
                           hf_first(&r->store.shape[u], &tensor[i]),
                       n * sizeof *found);
            assert_memory_equal(found,
                                values_in(text("%s/model.safetensors", base), tensor[i].name, n),
                                n * sizeof *found);
        }
        free(tensor);
    }
}

/* Returns the values of an adapter's tensor in its region, in F32. */
static const float *values_of(const Run *r, const char *name, size_t *n)
{
    for (int u = 0; u < r->store.num_units; u++) {
        int count;
        HfTensor *tensor = hf_tensors(&r->config.model, &r->store.shape[u], u, &count);
        for (int i = 0; i < count; i++) {
            if (strcmp(tensor[i].name, name) != 0)
                continue;
            const Shard *s = &r->store.shard[u];
            *n = tensor[i].rows * tensor[i].cols;
            float *x = keep(*n * sizeof *x);
            const UnitLayout *shape = &r->store.shape[u];
            device_get(x,
                       (float *)s->slice[shape->param[tensor[i].param].region].stored.data +
                           hf_first(shape, &tensor[i]),
                       *n * sizeof *x);
            free(tensor);
            return x;
        }
        free(tensor);
    }
    fail_msg("no %s", name);
    return NULL;
}

TEST(test_round_trip)
{
    for (SmallModel a = 0; a <= QWEN3_MOE; a++) {
        const char *base = save_base(a);
        Run saved, loaded, evaluated;
        TrainState s = { 0 }, expected = state_of(LAST_STEP);
        WeightFiles source = weight_files_open(base);
        expected.base_fingerprint = base_fingerprint(&source);
        weight_files_close(&source);
        open_adapted(&saved, a, base, all_modules, BASE_AS_FROZEN, "f32");
        open_adapted(&loaded, a, base, all_modules, BASE_AS_FROZEN, "f32");
        pattern_all(&saved, false);
        save(&saved, LAST_STEP);
        assert_true(checkpoint_load(step_folder(&saved, LAST_STEP), &loaded.config, &loaded.store,
                                    &s, true));
        assert_memory_equal(&s, &expected, sizeof s);
        pattern_all(&loaded, true);
        check_frozen(&loaded, base);
        close_run(&loaded);

        /* only forward passes: nothing is trained */
        open_adapted(&evaluated, a, base, all_modules, BASE_AS_FROZEN, "f32");
        close_run(&evaluated);
        evaluated.config.eval_only = true;
        place(&evaluated);
        assert_int_equal(evaluated.store.shape[1].numel[TRAINED], 0);
        assert_true(checkpoint_load(step_folder(&saved, LAST_STEP), &evaluated.config,
                                    &evaluated.store, &s, false));
        check_frozen(&evaluated, base);
        size_t n;
        const char *path = matrix_of(&saved.config.model, 1, LORA_UP).path,
                   *name = lasting(tensor_of(path, 'B'));
        const float *x = values_of(&evaluated, name, &n);
        assert_memory_equal(x, values_of(&saved, name, &n), n * sizeof *x);
        close_run(&evaluated);
        close_run(&saved);
        release();
    }
}

/* store_init initializes new adapters. The state of the run that saved their base is not used. */
TEST(test_new_adapters)
{
    const char *base = save_base(LLAMA);
    Run r, fresh;
    TrainState s = { .step = 5 };
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    open_adapted(&fresh, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    store_init(&fresh.store, &fresh.config.model, fresh.config.seed);
    assert_false(checkpoint_load(base, &r.config, &r.store, &s, true));
    assert_int_equal(s.step, 5);
    check_frozen(&r, base);
    for (int u = 0; u < r.store.num_units; u++) {
        const Tensor a = r.store.shard[u].slice[TRAINED].stored,
                     b = fresh.store.shard[u].slice[TRAINED].stored;
        if (a.cols > 0)
            assert_memory_equal(tensor_snapshot(a), tensor_snapshot(b), tensor_bytes(a));
    }
    size_t n;
    const float *x = values_of(&r, adapter_name(0, LORA_DOWN, 'B'), &n);
    for (size_t i = 0; i < n; i++)
        assert_true(x[i] == 0);
    x = values_of(&r, adapter_name(0, LORA_DOWN, 'A'), &n);
    assert_true(n == (size_t)RANK * 96 && x[0] != 0);
    close_run(&r);
    close_run(&fresh);
    release();
}

/* PEFT stores adapters in their training type. PEFT's state dictionaries have the adapter's name in
 * the names of tensors. */
TEST(test_types)
{
    static const struct {
        const char *dtype, *ending;
    } rows[] = { { "F16", ".weight" }, { "BF16", ".default.weight" } };
    const char *base = save_base(OLMO2), *name = lasting(adapter_name(1, LORA_K, 'A'));
    Run saved, loaded;
    open_adapted(&saved, OLMO2, base, all_modules, BASE_AS_FROZEN, "f32");
    load(&saved, base);
    save(&saved, LAST_STEP);
    for (int i = 0; i < 2; i++) {
        const char *folder = lasting(text("%s/peft%d", saved.config.save_folder, i));
        TrainState s = { .step = 5 };
        size_t n;
        shell(
            text("mkdir %s && cp %s/adapter* %s", folder, step_folder(&saved, LAST_STEP), folder));
        rewrite(text("%s/%s", folder, adapters), rows[i].dtype, rows[i].ending);
        open_adapted(&loaded, OLMO2, base, all_modules, BASE_AS_FROZEN, "f32");
        assert_false(checkpoint_load(folder, &loaded.config, &loaded.store, &s, true));
        const float *found = values_of(&loaded, name, &n), *exact = values_of(&saved, name, &n);
        uint16_t *codes = keep(n * sizeof *codes);
        float *expected = keep(n * sizeof *expected);
        convert_encode(codes, rows[i].dtype, exact, n);
        convert_decode(expected, rows[i].dtype, codes, n);
        assert_memory_equal(found, expected, n * sizeof *found);
        assert_true(n == (size_t)RANK * 64 && exact[0] != 0);
        close_run(&loaded);
    }
    close_run(&saved);
    release();
}

/* ---- folders that do not match --------------------------------------------------------------- */

TEST(test_refused)
{
    static const bool some[NUM_LORA_MODULES] = { [LORA_Q] = true };
    needs_fork();
    const char *base = save_base(LLAMA), *k = lasting(adapter_name(1, LORA_K, 'A'));
    Run r, few, more, none;
    ModelConfig m = architecture(LLAMA);
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    open_adapted(&few, LLAMA, base, some, BASE_AS_FROZEN, "f32");
    open_adapted(&more, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    close_run(&more);
    more.config.model.lora.rank = RANK + 1;
    place(&more);
    open_run(&none, &m, (Format){ F32, 0 }, (Format){ F32, 0 }, (Format){ F32, 0 });
    load(&r, base);
    load(&few, base);
    save(&r, LAST_STEP);
    save(&few, LAST_STEP);
    const char *folder = lasting(step_folder(&r, LAST_STEP)),
               *path = lasting(text("%s/%s", folder, adapters));

    DIES(text("has no place in the configured model"), load(&few, folder));
    DIES(text("there is no tensor %s, which the configured model needs",
              adapter_name(0, LORA_K, 'A')),
         load(&r, step_folder(&few, LAST_STEP)));
    shell(
        text("sed -i '1s/layers.1.self_attn.q_proj.lora_B/model.of_one_length.embed_tokens/' %s/%s",
             step_folder(&few, LAST_STEP), adapters));
    DIES(text("%s: PEFT saved the embedding or the head with the adapters (",
              step_folder(&few, LAST_STEP)),
         load(&few, step_folder(&few, LAST_STEP)));
    DIES("has shape (3, 64), the configured model needs (4, 64)", load(&more, folder));
    DIES("holds adapters, but the configuration has no lora.rank", load(&none, folder));
    r.config.model.lora.base_path = "/tmp/nowhere/at-all";
    DIES(text("%s: the base model of these adapters is missing: /tmp/nowhere/at-all; give the "
              "base model's folder: --lora.base_path=FOLDER",
              folder),
         load(&r, folder));
    const char *moved = convert_base(base, "F32");
    r.config.model.lora.base_path = (char *)moved;
    DIES(
        text("these adapters were trained with the base %s, and are now used with %s", base, moved),
        load(&r, folder);
        die("loaded"));
    r.config.model.lora.base_path = (char *)base;
    damage(text("%s/model.safetensors", base), "model.layers.0.mlp.up_proj.weight");
    DIES(text("%s/model.safetensors: tensor model.layers.0.mlp.up_proj.weight has the checksum",
              base),
         load(&r, folder));
    damage(path, k);
    DIES(text("%s: tensor %s has the checksum", path, k), load(&r, folder));
    shell(text("rm %s", path));
    DIES("the checkpoint is incomplete", load(&r, folder));
    shell(text("rm %s/trainer.json %s/optimizer*", folder, folder));
    DIES("no adapter_model.safetensors next to its adapter_config.json", load(&r, folder));
    close_run(&r);
    close_run(&few);
    close_run(&more);
    close_run(&none);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
