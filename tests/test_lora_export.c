/* ./train --export of adapters: each matrix is W + scale B A, rounded once; all other tensors equal
 * those of the base. Missing and mismatched tensors are reported. */
#include <jansson.h>

#include "model/export/merge.h"
#include "model/run/export_run.h"
#include "tests/test.h"
#include "tests/adapted.h"
#include "tests/exported.h"

/* ---- the product ----------------------------------------------------------------------------- */

/* Any range of a matrix of several blocks of columns, compared with sums in double. F32 sums of
 * rank + 1 products and W have errors below (rank + 4) roundings of the sum of magnitudes. */
static double product(double *magnitude, const float *w, const float *a, const float *b, int rank,
                      int in, size_t i)
{
    const size_t row = i / (size_t)in, col = i % (size_t)in;
    double sum = 0, all = 0;
    for (int j = 0; j < rank; j++) {
        const double x =
            (double)b[row * (size_t)rank + (size_t)j] * a[(size_t)j * (size_t)in + col];
        sum += x;
        all += fabs(x);
    }
    *magnitude = fabs((double)w[i]) + 2 * all;
    return w[i] + 2 * sum;
}

TEST(test_product)
{
    enum { ROWS = 7, COLS = 1100, MOST = 9 };
    static float w[ROWS * COLS], y[ROWS * COLS], a[MOST * COLS], b[ROWS * MOST];
    for (int rank = 1; rank <= MOST; rank++) {
        for (size_t i = 0; i < ROWS * COLS; i++)
            y[i] = w[i] = test_uniform(1, i);
        for (size_t i = 0; i < MOST * COLS; i++)
            a[i] = test_uniform(2, i);
        for (size_t i = 0; i < ROWS * MOST; i++)
            b[i] = test_uniform(3, i);
        Merge m = merge_open(a, b, rank, ROWS, COLS, 2);
        for (size_t at = 0, n = 1; at < ROWS * COLS; at += n, n = 2 * n + 1) {
            n = ROWS * COLS - at < n ? ROWS * COLS - at : n;
            merge_add(y + at, &m, at, n);
        }
        merge_close(&m);
        for (size_t i = 0; i < ROWS * COLS; i++) {
            double all, expected = product(&all, w, a, b, rank, COLS, i);
            assert_true(fabs(y[i] - expected) <= (rank + 4) * U24 * all);
        }
    }
}

/* ---- folders --------------------------------------------------------------------------------- */

/* Makes adapters whose product is as large as W. */
static void fill_adapters(const Run *r)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Tensor t = r->store.shard[u].slice[TRAINED].stored;
        const size_t n = tensor_numel(t);
        float *x = keep(sizeof *x * (n + 1));
        for (size_t i = 0; i < n; i++)
            x[i] = 0.3f * test_uniform((uint64_t)u, i);
        if (n > 0)
            device_put(t.data, x, sizeof *x * n);
    }
}

/* Returns half the distance between two neighbours in BF16, or F32, at x. */
static double half_step(double x, bool narrow)
{
    int e;
    frexp(x, &e);
    return ldexp(1, e - (narrow ? 9 : 25));
}

static void check_matrix(const char *name, const float *found, const float *w, const float *a,
                         const float *b, int rank, int in, size_t n, bool narrow)
{
    for (size_t i = 0; i < n; i++) {
        double all, expected = product(&all, w, a, b, rank, in, i),
                    bound = half_step(expected, narrow) + (rank + 4) * U24 * all;
        if (!(fabs(found[i] - expected) <= bound))
            fail_msg("%s[%zu]: %.9g, expected %.9g", name, i, (double)found[i], expected);
    }
}

/* Compares all tensors of the exported folder with those of the base, some plus an adapter's
 * product. */
static void check_export(const char *out, const char *base, const char *folder,
                         const ModelConfig *m, bool narrow)
{
    const char *merged = lasting(text("%s/model.safetensors", out)),
               *from = lasting(text("%s/model.safetensors", base));
    const char *adapters = lasting(text("%s/adapter_model.safetensors", folder));
    SafeFile *f = safetensors_open(merged), *g = safetensors_open(from);
    int joined = 0;
    assert_int_equal(f->count, g->count);
    for (int i = 0; i < f->count; i++) {
        const char *name = f->tensor[i].name;
        const SafeTensor *t = safetensors_find(g, name);
        const size_t n = t->shape[0] * (t->dims == 2 ? t->shape[1] : 1);
        float *found = values_in(merged, name, n), *w = values_in(from, name, n);
        assert_true(f->tensor[i].dims == t->dims && f->tensor[i].shape[0] == t->shape[0]);
        assert_string_equal(f->tensor[i].dtype, narrow ? "BF16" : "F32");
        int layer, rank = m->lora.rank;
        bool matrix = false;
        const int numbers =
            sscanf(name, "model.layers.%d.", &layer) == 1 ? num_matrices(m, layer) : 0;
        for (int k = 0; k < numbers && !matrix; k++) {
            const Adapted of = matrix_of(m, layer, k);
            if (!m->lora.target[of.module] || strcmp(name, text("%s.weight", of.path)) != 0)
                continue;
            check_matrix(
                name, found, w,
                values_in(adapters, tensor_of(of.path, 'A'), (size_t)rank * (size_t)of.in),
                values_in(adapters, tensor_of(of.path, 'B'), (size_t)of.out * (size_t)rank), rank,
                of.in, n, narrow);
            matrix = true;
            joined++;
        }
        if (!matrix && narrow)
            convert_encode(w, "BF16", w, n),
                convert_decode(w, "BF16", memcpy(keep(2 * n), w, 2 * n), n);
        if (!matrix)
            assert_memory_equal(found, w, n * sizeof *w);
    }
    assert_true(joined >= 2 * m->n_layers);
    safetensors_close(f);
    safetensors_close(g);
}

TEST(test_architectures)
{
    static const bool some[NUM_LORA_MODULES] = {
        [LORA_K] = true, [LORA_GATE] = true, [LORA_DOWN] = true
    };
    for (SmallModel a = 0; a <= QWEN3_MOE; a++) {
        const char *base = save_base(a);
        Run r;
        open_adapted(&r, a, base, a % 2 && a < OLMOE ? some : all_modules, BASE_AS_FROZEN, "f32");
        fill_adapters(&r);
        save(&r, LAST_STEP);
        const char *out = lasting(text("%s/out", r.config.save_folder)),
                   *narrow = lasting(text("%s/narrow", r.config.save_folder));
        export_folder(step_folder(&r, LAST_STEP), NULL, out, "F32", CHECKPOINT_FILE_BYTES);
        /* its latest */
        export_folder(r.config.save_folder, NULL, narrow, "BF16", CHECKPOINT_FILE_BYTES);
        check_export(out, base, step_folder(&r, LAST_STEP), &r.config.model, false);
        check_export(narrow, base, step_folder(&r, LAST_STEP), &r.config.model, true);
        shell(text("test \"$(ls %s | tr '\\n' ' ')\" = 'config.json model.safetensors ' && cmp "
                   "%s/config.json %s/config.json",
                   out, out, base));
        close_run(&r);
        release();
    }
}

/* The tokenizer and generation_config.json come from the adapters' folder, or else from the base.
 * Files have a limited size. */
TEST(test_tokenizer_files)
{
    const char *base = save_base(LLAMA);
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    shell(text("cd %s && echo base | tee tokenizer.json >merges.txt && echo '{\"top_p\": 0.5}' "
               ">generation_config.json",
               base));
    load(&r, base);
    save(&r, LAST_STEP);
    const char *folder = lasting(step_folder(&r, LAST_STEP)),
               *out = lasting(text("%s/out", r.config.save_folder));
    shell(text("cd %s && for f in tokenizer.json merges.txt generation_config.json; do cmp $f "
               "%s/$f || exit 1; done && "
               "test ! -e config.json",
               folder, base));
    shell(
        text("cd %s && rm merges.txt generation_config.json && echo own >tokenizer.json", folder));
    export_folder(folder, NULL, out, "F32", 30000);
    shell(text(
        "cd %s && grep -q own tokenizer.json && test ! -e merges.txt && cmp generation_config.json "
        "%s/generation_config.json",
        out, base));
    shell(text("cd %s && test -e model.safetensors.index.json && test $(ls "
               "model-*-of-*.safetensors | wc -l) -gt 9",
               out));
    shell(text("rm %s/tokenizer.json && rm -r %s", folder, out));
    export_folder(folder, NULL, out, "F32", CHECKPOINT_FILE_BYTES);
    shell(text("cd %s && cmp tokenizer.json %s/tokenizer.json && cmp merges.txt %s/merges.txt", out,
               base, base));
    shell(text("rm %s/tokenizer.json %s/merges.txt %s/generation_config.json", base, base, base));
    load(&r, base); /* later checkpoints of the process have none */
    close_run(&r);
    release();
}

/* If no file of the base has the run's eos token, this token comes before those of the base. */
TEST(test_eos)
{
    const char *base = save_base(LLAMA);
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    load(&r, base);
    save(&r, LAST_STEP);
    shell(text("test ! -e %s/generation_config.json", step_folder(&r, LAST_STEP)));
    r.config.model.eos_token_id = 9;
    for (int i = 0; i < 2; i++) {
        save(&r, LAST_STEP);
        json_t *o =
            json_load_file(text("%s/generation_config.json", step_folder(&r, LAST_STEP)), 0, NULL);
        json_t *expected = json_pack("{s:[i, i]}", "eos_token_id", 9, 0);
        assert_true(json_equal(o, expected));
        json_decref(o);
        json_decref(expected);
    }
    load(&r, base);
    close_run(&r);
    release();
}

/* Adapters whose base was moved; the command line gives its new path. */
TEST(test_moved)
{
    const char *base = save_base(LLAMA), *moved = lasting(text("%s/moved", root)),
               *out = lasting(text("%s/whole", root));
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    fill_adapters(&r);
    save(&r, LAST_STEP);
    shell(text("mv %s %s", base, moved));
    char *argv[] = { "train", xstrdup(text("--export=%s", step_folder(&r, LAST_STEP))),
                     "--dtype=f32", xstrdup(text("--lora.base_path=%s", moved)), xstrdup(out) };
    export_run(5, argv);
    check_export(out, moved, step_folder(&r, LAST_STEP), &r.config.model, false);
    free(argv[1]);
    free(argv[3]);
    free(argv[4]);
    close_run(&r);
    release();
}

/* Codes and scales of the merged weights, which no run has used. */
TEST(test_codes)
{
    static const char *const dtypes[] = { "fp8", "int8", "nf4" };
    const char *base = save_base(LLAMA), *merged = lasting(text("%s/merged", root));
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "fp8");
    fill_adapters(&r);
    save(&r, LAST_STEP);
    export_folder(step_folder(&r, LAST_STEP), NULL, merged, "F32", CHECKPOINT_FILE_BYTES);
    for (int i = 0; i < 3; i++) {
        const char *one = lasting(text("%s/one-%s", root, dtypes[i])),
                   *other = lasting(text("%s/other-%s", root, dtypes[i]));
        export_folder(step_folder(&r, LAST_STEP), NULL, one, dtypes[i], CHECKPOINT_FILE_BYTES);
        export_folder(merged, NULL, other, dtypes[i], CHECKPOINT_FILE_BYTES);
        shell(text(
            "cmp %s/model.safetensors %s/model.safetensors && cmp %s/config.json %s/config.json",
            one, other, one, other));
    }
    ExportOptions o = export_options_of(lasting(step_folder(&r, LAST_STEP)), NULL,
                                        lasting(text("%s/none", root)), "fp8");
    o.scales = SCALES_TRAINED;
    if (on_cpu())
        DIES("needs a checkpoint of a run with E4M3 operands, but this folder has adapters",
             export_to(&o, CHECKPOINT_FILE_BYTES));
    close_run(&r);
    release();
}

/* Renames a tensor of a file; the names have the same length. */
static void rename_tensor(const char *path, const char *from, const char *to)
{
    assert_int_equal(strlen(from), strlen(to));
    shell(text("sed -i '1s/%s/%s/' %s", from, to, path));
}

TEST(test_refused)
{
    needs_fork();
    const char *base = save_base(LLAMA);
    Run r;
    open_adapted(&r, LLAMA, base, all_modules, BASE_AS_FROZEN, "f32");
    fill_adapters(&r);
    save(&r, LAST_STEP);
    const char *folder = lasting(step_folder(&r, LAST_STEP)), *out = lasting(text("%s/out", root));
    const char *path = lasting(text("%s/adapter_model.safetensors", folder));
    const char *description = lasting(text("%s/adapter_config.json", folder));
    shell(text("cp -r %s %s.good && cp -r %s %s.good", folder, folder, base, base));
    shell(text("rm %s/trainer.json %s/optimizer*", folder, folder));
    shell(text("rm %s/trainer.json %s/optimizer*", base, base));

    shell(text("sed -i 's,%s,/tmp/nowhere/at-all,' %s", base, description));
    DIES("base_model_name_or_path of adapter_config.json is not a folder with a config.json: "
         "/tmp/nowhere/at-all",
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    DIES(text("but --lora.base_path is not a folder with a config.json: %s; give the base "
              "model's folder: --lora.base_path=FOLDER",
              folder),
         export_folder(folder, folder, out, "BF16", CHECKPOINT_FILE_BYTES));
    DIES("is a whole model without adapters, so it has no base",
         export_folder(base, base, out, "BF16", CHECKPOINT_FILE_BYTES));
    shell(text("cp %s.good/adapter_config.json %s", folder, folder));
    rename_tensor(path, "layers.1.mlp.up_proj.lora_B", "layers.7.mlp.up_proj.lora_B");
    DIES("there is no tensor base_model.model.model.layers.1.mlp.up_proj.lora_B.weight, which the "
         "adapters of its adapter_config",
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    shell(text("cp %s.good/adapter_model.safetensors %s && sed -i '/\"up_proj\"/d' %s", folder,
               folder, description));
    DIES("mlp.up_proj.lora_", export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    DIES(" has no place in the adapters of adapter_config.json",
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    rename_tensor(path, "mlp.up_proj.lora_A", "mlp.up_pro.lm_head");
    DIES(text("%s: PEFT saved the embedding or the head with the adapters "
              "(base_model.model.model.layers.0.mlp.up_pro.lm_head",
              folder),
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    shell(text("cp %s.good/adapter_model.safetensors %s", folder, folder));
    shell(text("cp %s.good/adapter_config.json %s && sed -i 's/\"r\": 3/\"r\": 2/' %s", folder,
               folder, description));
    DIES("according to adapter_config.json it needs 2 rows of 64",
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    shell(text("cp %s.good/adapter_config.json %s", folder, folder));

    SafeFile *f = safetensors_open(path);
    const SafeTensor *t = safetensors_find(f, adapter_name(1, LORA_O, 'A'));
    shell(text("printf '\\000\\000\\300\\177' | dd of=%s bs=1 seek=%zu conv=notrunc 2>/dev/null",
               path, f->data + t->begin + 8));
    safetensors_close(f);
    DIES(text("%s: tensor %s holds a value that is not finite", path, adapter_name(1, LORA_O, 'A')),
         export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    shell(text("rm -r %s.tmp; cp %s.good/adapter_model.safetensors %s", out, folder, folder));

    export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES);
    DIES("exists already", export_folder(folder, NULL, out, "BF16", CHECKPOINT_FILE_BYTES));
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
