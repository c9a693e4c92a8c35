/* ./train --average: each weight is the weighted mean of the sources' weights, computed in double
 * and rounded once. Sources that do not fit together are refused, and the message names them. */
#include "model/checkpoint/safetensors.h"
#include "model/run/average.h"
#include "model/run/export_run.h"
#include "tests/test.h"
#include "tests/exported.h"
#include "tests/saved.h"

enum { SOURCES = 3 };
static const double weights[SOURCES] = { 0.5, 2, 1.5 }; /* sum 4: the shares are exact */

static void run_with(const char *a, const char *b, const char *c)
{
    char *argv[] = { "train", (char *)a, (char *)b, (char *)c, NULL };
    const int argc = 2 + (b != NULL) + (c != NULL);
    assert_true(export_options_asked(argc, argv));
    export_run(argc, argv);
}

/* Saves three models with different random weights in <save_folder>/step1 to step3. */
static void open_three(Run *r, SmallModel a)
{
    const ModelConfig m = architecture(a);
    const Format f32 = { F32, 0 };
    open_run(r, &m, f32, f32, f32);
    for (int i = 0; i < SOURCES; i++) {
        store_init(&r->store, &r->config.model, (uint64_t)i + 3);
        save(r, i + 1);
    }
}

static const float *values_of(const SafeFile *f, const char *name)
{
    const SafeTensor *t = safetensors_find(f, name);
    assert_non_null(t);
    void *bytes = keep(t->end - t->begin);
    safetensors_read(f, bytes, t, 0, t->end - t->begin);
    return bytes;
}

/* Compares the folder's tensors with the weighted mean of the checkpoints' tensors. The weights w
 * sum to `sum`. */
static void check_mean(const Run *r, const char *folder, const double w[SOURCES], double sum)
{
    SafeFile *from[SOURCES], *to = safetensors_open(text("%s/model.safetensors", folder));
    for (int k = 0; k < SOURCES; k++)
        from[k] = safetensors_open(text("%s/model.safetensors", step_folder(r, k + 1)));
    assert_true(to->count > 0 && to->count == from[0]->count);
    for (int t = 0; t < to->count; t++) {
        const SafeTensor *a = &to->tensor[t];
        const float *x[SOURCES], *y = values_of(to, a->name);
        assert_string_equal(a->dtype, "F32");
        for (int k = 0; k < SOURCES; k++)
            x[k] = values_of(from[k], a->name);
        for (size_t i = 0; i < (a->end - a->begin) / sizeof *y; i++) {
            double mean = 0;
            for (int k = 0; k < SOURCES; k++)
                mean += w[k] / sum * (double)x[k][i];
            assert_true(y[i] == (float)mean);
        }
    }
    for (int k = 0; k < SOURCES; k++)
        safetensors_close(from[k]);
    safetensors_close(to);
}

static const char *three(const Run *r)
{
    const char *f = r->config.save_folder;
    return text("--average=%s/step1,%s/step2,%s/step3", f, f, f);
}

TEST(test_means)
{
    static const double equal[SOURCES] = { 1, 1, 1 };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Run r;
        open_three(&r, a);
        const char *folder = lasting(text("%s/mean", r.config.save_folder)),
                   *sources = lasting(three(&r));
        const char *other = lasting(text("%s/weighted", r.config.save_folder));
        run_with(sources, "--dtype=f32", folder);
        check_mean(&r, folder, equal, SOURCES);
        run_with(text("%s:0.5,2,1.5", sources), "--dtype=f32", other);
        check_mean(&r, other, weights, 4);
        close_run(&r);
        release();
    }
}

TEST(test_refusals)
{
    needs_fork();
    Run r;
    open_three(&r, LLAMA);
    const char *f = r.config.save_folder, *sources = lasting(three(&r)),
               *out = lasting(text("%s/out", f));
    const struct {
        const char *damage, *message;
    } table[] = {
        { "sed -i 's/\"rope_theta\": [0-9.]*/\"rope_theta\": 777.0/' config.json",
          "step2/config.json: rope_theta is 777.0, but" },
        { "sed -i 's/\"rms_norm_eps\": [0-9.e-]*/\"rms_norm_eps\": 0.5/' config.json",
          "step2/config.json: rms_norm_eps is 0.5" },
        { "printf 5 | dd of=model.safetensors conv=notrunc bs=1 seek=9000 2>/dev/null",
          "step2/model.safetensors: tensor " },
        { "sed -i 's/\"num_hidden_layers\": 2/\"num_hidden_layers\": 1/' config.json",
          "step2/model.safetensors: tensor model.layers.1." },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        shell(text("cd %s && cp -r step2 safe && cd step2 && %s", f, table[i].damage));
        DIES(table[i].message, run_with(sources, "--dtype=f32", out));
        assert_false(exists(out));
        shell(text("cd %s && rm -rf out.tmp step2 && mv safe step2", f));
    }
    shell(text("cd %s && mkdir nan && cp step2/config.json step2/model.safetensors nan", f));
    SafeFile *nan = safetensors_open(text("%s/nan/model.safetensors", f));
    const size_t at = nan->data + safetensors_find(nan, "model.norm.weight")->begin;
    safetensors_close(nan);
    shell(text("printf '\\0\\0\\300\\177' | dd of=%s/nan/model.safetensors conv=notrunc bs=1 "
               "seek=%zu 2>/dev/null",
               f, at));
    DIES("nan/model.safetensors: tensor model.norm.weight holds a value that is not finite",
         run_with(text("--average=%s/step1,%s/nan", f, f), "--dtype=f32", out));
    close_run(&r);
    release();
}

/* A run that continues with another average.last or average.every writes no mean for the group of
 * snapshots in which it begins. */
TEST(test_other_groups)
{
    static const struct {
        long last, every, step, count;
        bool complete;
    } rows[] = {
        { 4, 2, 2, 1, false },  { 4, 2, 4, 2, false },  { 3, 2, 6, 1, false },
        { 3, 2, 8, 1, false },  { 3, 2, 10, 2, false }, { 3, 2, 12, 3, true },
        { 3, 2, 14, 1, false }, { 3, 4, 20, 1, false }, { 3, 4, 24, 2, false },
        { 3, 4, 28, 1, false },
    };
    ParamStore none = { 0 };
    TrainState s = { 0 };
    for (int i = 0; i < 10; i++) {
        Config c = { .average = { .last = rows[i].last, .every = rows[i].every } };
        s.step = rows[i].step;
        average_step(&none, &c, s.step);
        assert_int_equal(none.counts.average.count, rows[i].count);
        assert_int_equal(average_is_complete(&none, &c, &s), rows[i].complete);
    }
}

TEST(test_arguments)
{
    needs_fork();
    DIES("expected at least two folders", run_with("--average=a", "y", NULL));
    DIES("the name of folder 2 is empty", run_with("--average=a,,b", "y", NULL));
    DIES("found '' for b", run_with("--average=a,b:1", "y", NULL));
    DIES("there are more weights than the 2 folders", run_with("--average=a,b:1,2,3", "y", NULL));
    DIES("found '-1' for b", run_with("--average=a,b:1,-1", "y", NULL));
    DIES("found '0' for a", run_with("--average=a,b:0,1", "y", NULL));
    DIES("exclude each other", run_with("--average=a,b", "--export=x", "y"));
    DIES("--average: a: there is no such folder", run_with("--average=a,b", "y", NULL));
    DIES("the mean of several models has none", run_with("--average=a,b", "--scales=trained", "y"));
    DIES("'--average=' names no folder", run_with("--average=", "y", NULL));
}

/* One of the sources has padding rows of the vocabulary, which an export leaves out. The tokenizer
 * is taken from the first source. This test is the last one, because it reads a tokenizer. */
TEST(test_padding_and_tokenizer)
{
    static const double equal[SOURCES] = { 1, 1, 1 };
    Run r;
    open_three(&r, LLAMA);
    const char *folder = lasting(text("%s/padded", r.config.save_folder));
    SafeFile *one = safetensors_open(text("%s/model.safetensors", step_folder(&r, 2)));
    SafeFile *padded = safetensors_new(text("%s/padded.safetensors", root));
    for (int i = 0; i < one->count; i++) {
        size_t shape[SAFE_DIMS] = { one->tensor[i].shape[0], one->tensor[i].shape[1] };
        if (shape[0] == (size_t)r.config.model.vocab_size)
            shape[0] = (size_t)r.config.model.embedding_size;
        safetensors_add(padded, one->tensor[i].name, "F32", one->tensor[i].dims, shape);
    }
    safetensors_lay_out(padded);
    safetensors_create(padded);
    for (int i = 0; i < one->count; i++) {
        const SafeTensor *t = &one->tensor[i];
        assert_true(safetensors_write(padded, safetensors_find(padded, t->name), 0,
                                      values_of(one, t->name), t->end - t->begin));
    }
    assert_true(r.config.model.embedding_size > r.config.model.vocab_size &&
                padded->bytes > one->bytes);
    safetensors_close(one);
    safetensors_close(padded);
    shell(text("cd %s && mkdir wide && cp %s/config.json wide && mv padded.safetensors "
               "wide/model.safetensors && "
               "echo one >%s/tokenizer.json",
               root, step_folder(&r, 2), step_folder(&r, 1)));
    shell(text("echo two >%s/tokenizer.json", step_folder(&r, 3)));
    run_with(text("--average=%s,%s/wide,%s", step_folder(&r, 1), root, step_folder(&r, 3)),
             "--dtype=f32", folder);
    check_mean(&r, folder, equal, SOURCES);
    export_folder(text("%s/wide", root), NULL, lasting(text("%s/one", root)), "F32",
                  CHECKPOINT_FILE_BYTES);
    shell(text("cmp %s/one/model.safetensors %s/model.safetensors", root, step_folder(&r, 2)));
    shell(text("test \"$(cat %s/tokenizer.json)\" = one && ls %s | tr '\\n' ' ' | grep -q "
               "'^config.json model.safetensors "
               "tokenizer.json $'",
               folder, folder));
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
