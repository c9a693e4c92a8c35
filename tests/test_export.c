/* ./train --export: each weight equals the checkpoint's weight, rounded. Files and folders are as
 * from save_pretrained. Nothing is overwritten, and incomplete folders have another name. */
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>

#include "model/checkpoint/convert.h"
#include "model/checkpoint/safetensors.h"
#include "model/checkpoint/tokenizer_files.h"
#include "model/config/export_options.h"
#include "model/run/export_run.h"
#include "tests/test.h"
#include "tests/coded.h"

/* ---- rounding -------------------------------------------------------------------------------- */

static unsigned encode(const char *dtype, double x, bool fits)
{
    const float f = (float)x;
    uint16_t code = 0;
    assert_true((double)f == x);
    assert_int_equal(convert_encode(&code, dtype, &f, 1), fits ? 1 : 0);
    return code;
}

/* Every value that a code can represent stays exact; other values round to the nearest code, ties
 * to even. */
static void check_codes(const char *dtype, int exponent_bits, int mantissa_bits)
{
    const unsigned end = ((1u << exponent_bits) - 1) << mantissa_bits;
    for (unsigned c = 0; c < end; c++)
        for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000) {
            const double x = value_of(c | sign, exponent_bits, mantissa_bits);
            const double next = c + 1 < end ? value_of((c + 1) | sign, exponent_bits, mantissa_bits)
                                            : copysign(ldexp(1, 1 << (exponent_bits - 1)), x);
            const float middle = (float)(x + (next - x) / 2), below = nextafterf(middle, (float)x);
            const uint16_t code = (uint16_t)(c | sign);
            float decoded;
            convert_decode(&decoded, dtype, &code, 1);
            assert_true(decoded == (float)x && !signbit(decoded) == !signbit(x));
            assert_int_equal(encode(dtype, x, true), code);
            assert_int_equal(encode(dtype, (double)below, true), code);
            encode(dtype, (double)middle, c + 1 < end);
            if (c + 1 < end) {
                assert_int_equal(encode(dtype, (double)middle, true), code + (c & 1));
                assert_int_equal(
                    encode(dtype, (double)nextafterf(middle, copysignf(INFINITY, middle)), true),
                    code + 1);
            }
        }
    encode(dtype, (double)INFINITY, false);
    encode(dtype, -(double)INFINITY, false);
}

TEST(test_codes)
{
    check_codes("F16", 5, 10);
    check_codes("BF16", 8, 7);
}

/* ---- folders --------------------------------------------------------------------------------- */

static void expect_files(const char *name, const char *expected)
{
    shell(text("test \"$(ls %s | tr '\\n' ' ')\" = '%s '", name, expected));
}

/* Returns the bytes of the tensor, valid until release(). */
static void *bytes_of(const SafeFile *f, const SafeTensor *t)
{
    void *bytes = keep(t->end - t->begin);
    safetensors_read(f, bytes, t, 0, t->end - t->begin);
    return bytes;
}

static void check_rounded(const float *master, const void *raw, const char *dtype, size_t n)
{
    const bool half = strcmp(dtype, "F16") == 0;
    for (size_t i = 0; i < n; i++) {
        const uint16_t code = ((const uint16_t *)raw)[i];
        const double found = value_of(code, half ? 5 : 8, half ? 10 : 7);
        assert_true(found == nearest((double)master[i], half ? 10 : 7, half ? -14 : -126) &&
                    !signbit(found) == !signbit(master[i]));
    }
}

/* Compares all tensors of the exported file with those of the checkpoint, which is in f32. */
static void check_export(const Run *r, const char *dtype)
{
    const char *folder = lasting(text("%s/%s", r->config.save_folder, dtype));
    export_folder(step_folder(r, 1), NULL, folder, dtype, CHECKPOINT_FILE_BYTES);
    expect_files(folder, "config.json model.safetensors");
    SafeFile *from = safetensors_open(text("%s/model.safetensors", step_folder(r, 1)));
    SafeFile *to = safetensors_open(text("%s/model.safetensors", folder));
    assert_int_equal(from->count, to->count);
    for (int i = 0; i < to->count; i++) {
        const SafeTensor *a = safetensors_find(from, to->tensor[i].name), *b = &to->tensor[i];
        assert_non_null(a);
        assert_true(strcmp(b->dtype, dtype) == 0 && a->dims == b->dims &&
                    memcmp(a->shape, b->shape, sizeof a->shape) == 0);
        const size_t n = (a->end - a->begin) / sizeof(float);
        const void *master = bytes_of(from, a), *raw = bytes_of(to, b);
        if (strcmp(dtype, "F32") == 0)
            assert_memory_equal(master, raw, n * sizeof(float));
        else
            check_rounded(master, raw, dtype, n);
    }
    safetensors_close(from);
    safetensors_close(to);
}

/* config.json equals the checkpoint's config.json, except for the type. */
static void check_config(const Run *r, const char *dtype, const char *name)
{
    json_t *from = json_load_file(text("%s/config.json", step_folder(r, 1)), 0, NULL);
    json_t *to = json_load_file(text("%s/%s/config.json", r->config.save_folder, dtype), 0, NULL);
    assert_string_equal(json_string_value(json_object_get(to, "torch_dtype")), name);
    json_object_set_new(from, "torch_dtype", json_string(name));
    assert_true(json_equal(from, to));
    json_decref(from);
    json_decref(to);
}

/* Midpoints of bf16 or f16, values too small for f16's exponent, and 0 with a sign. */
static void put_odd_values(const Run *r)
{
    const float odd[] = { 0x1.01p0f,    0x1.03p0f,   -0x1.01p0f, -0x1.03p-3f, 0x1.002p0f,
                          0x1.006p0f,   0x1p-25f,    0x1.8p-24f, 0x1p-26f,    -0.f,
                          0x1.ffep-15f, 0x1.ffffp3f, 0x1p-140f,  65519.f };
    assert_true(r->store.shard[1].slice[TRAINED].count > 256 + sizeof odd);
    device_put((float *)r->store.shard[1].slice[TRAINED].stored.data + 256, odd, sizeof odd);
}

TEST(test_architectures)
{
    const Format f32 = { F32, 0 };
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        Run r;
        ModelConfig m = architecture(a);
        open_run(&r, &m, f32, f32, f32);
        store_init(&r.store, &r.config.model, 3);
        put_odd_values(&r);
        save(&r, 1);
        check_export(&r, "BF16");
        check_export(&r, "F16");
        check_export(&r, "F32");
        check_config(&r, "BF16", "bfloat16");
        check_config(&r, "F16", "float16");
        check_config(&r, "F32", "float32");
        close_run(&r);
        release();
    }
}

/* Each file has at most the requested size, or a single tensor. The index names the file of each
 * tensor. */
TEST(test_shards)
{
    enum { LIMIT = 10000 };
    Run r;
    open_small(&r);
    r.file_limit = 50000;
    save(&r, 1);
    const char *whole = lasting(text("%s/whole", root)), *parts = lasting(text("%s/parts", root));
    export_folder(step_folder(&r, 1), NULL, whole, "BF16", CHECKPOINT_FILE_BYTES);
    export_folder(step_folder(&r, 1), NULL, parts, "BF16", LIMIT);
    json_t *index = json_load_file(text("%s/model.safetensors.index.json", parts), 0, NULL), *name;
    SafeFile *one = safetensors_open(text("%s/model.safetensors", whole));
    size_t files = 0, all = 0;
    const char *key;
    json_object_foreach(json_object_get(index, "weight_map"), key, name)
    {
        SafeFile *part = safetensors_open(text("%s/%s", parts, json_string_value(name)));
        const SafeTensor *a = safetensors_find(one, key), *b = safetensors_find(part, key);
        assert_true(a && b && a->end - a->begin == b->end - b->begin &&
                    (part->bytes <= LIMIT || part->count == 1));
        assert_memory_equal(bytes_of(one, a), bytes_of(part, b), a->end - a->begin);
        files += b == &part->tensor[0];
        all += b->end - b->begin;
        safetensors_close(part);
    }
    assert_true(files > 3 && all == one->bytes);
    assert_int_equal(json_object_size(json_object_get(index, "weight_map")), one->count);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size")), all);
    /* in F32 */
    json_t *of_run =
        json_load_file(text("%s/model.safetensors.index.json", step_folder(&r, 1)), 0, NULL);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(of_run, "metadata"), "total_size")),
        2 * all);
    json_decref(of_run);
    shell(text("test \"$(ls %s | grep -c '^model-.*-of-%05zu.safetensors$')\" = %zu", parts, files,
               files));
    safetensors_close(one);
    json_decref(index);
    load(&r, parts); /* the export can be loaded as a model folder */
    export_folder(parts, NULL, text("%s/again", root), "BF16", CHECKPOINT_FILE_BYTES);
    shell(text("cd %s && cmp again/model.safetensors whole/model.safetensors", root));
    close_run(&r);
    release();
}

/* The tokenizer's files are copied byte for byte. Training files and unknown files are not
 * copied. */
TEST(test_tokenizer_files)
{
    Run r;
    open_small(&r);
    save(&r, 3);
    shell(text("cd %s && mkdir additional_chat_templates && printf 'a\\0b' "
               ">additional_chat_templates/tools.jinja && "
               "for f in tokenizer.json tokenizer.model tokenizer_config.json "
               "special_tokens_map.json added_tokens.json vocab.json "
               "vocab.txt merges.txt chat_template.jinja chat_template.json tekken.json "
               "generation_config.json notes.txt; do "
               "printf \"$f\\0\\n\\r\" >$f; done",
               step_folder(&r, 3)));
    export_folder(r.config.save_folder, NULL, text("%s/whole", r.config.save_folder), "F32",
                  CHECKPOINT_FILE_BYTES);
    shell(text("cd %s && test \"$(diff -r -q step3 whole)\" = 'Only in step3: config.yaml\nOnly in "
               "step3: notes.txt\nOnly in "
               "step3: optimizer-00001.states\nOnly in step3: trainer.json'",
               r.config.save_folder));
    close_run(&r);
    release();
}

/* The generation_config.json of a checkpoint has the run's eos, in front of those of the model with
 * which the run began. */
TEST(test_stops)
{
    static const struct {
        const char *loaded, *saved;
    } cases[] = {
        { "{\"eos_token_id\": 7, \"top_p\": 0.6}", "{\"eos_token_id\":[9,7],\"top_p\":0.6}" },
        { "{\"eos_token_id\": [7, 8]}", "{\"eos_token_id\":[9,7,8]}" },
        { "{\"eos_token_id\": [8, 9]}", NULL },
        { "{\"eos_token_id\": 9}", NULL },
        { "{\"top_p\": 0.6}", NULL },
        { "{", NULL },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *config = json_pack("{s:i}", "eos_token_id", 9);
        shell(text("cd %s && mkdir -p stops out && printf '%s' >stops/generation_config.json", root,
                   cases[i].loaded));
        tokenizer_files_read(text("%s/stops", root), root);
        tokenizer_files_complete_config(config);
        tokenizer_files_write(text("%s/out", root));
        if (!cases[i].saved)
            shell(text("cmp %s/stops/generation_config.json %s/out/generation_config.json", root,
                       root));
        else {
            json_t *saved = json_load_file(text("%s/out/generation_config.json", root), 0, NULL);
            json_t *expected = json_loads(cases[i].saved, 0, NULL);
            assert_true(saved && json_equal(saved, expected));
            json_decref(saved);
            json_decref(expected);
        }
        json_decref(config);
    }
    shell(text("cd %s && rm -r stops out && mkdir stops", root));
    /* later checkpoints of the process have none */
    tokenizer_files_read(text("%s/stops", root), root);
}

/* Messages about a tokenizer in the configuration come before a run begins. */
TEST(test_tokenizers)
{
    needs_fork();
    shell(text("cd %s && mkdir none pipe && mkfifo pipe/tokenizer.json && echo nonsense >bad.json "
               "&& echo '{}' >empty.json && "
               "echo '{\"model\": {\"vocab\": {\"a\": 0, \"b\": 99}}}' >bpe.json && "
               "echo '{\"model\": {\"vocab\": [[\"a\", 0], [\"b\", -1]]}, \"added_tokens\": "
               "[{\"id\": 100}]}' >unigram.json",
               root));
    const struct {
        const char *name;
        int vocab_size;
        const char *message;
    } wrong[] = {
        { "missing", 100,
          "missing: No such file or directory; expected a tokenizer.json, or a folder with one" },
        { "none", 100,
          "none: there is no tokenizer; expected a tokenizer.json or tokenizer.model, or a folder "
          "with one" },
        { "pipe", 100, "tokenizer.json: is a pipe, expected a regular file" },
        { "bad.json", 100, "bad.json: tokenizer.json:1: not JSON" },
        { "empty.json", 100, "tokenizer.json has no model.vocab" },
        { "bpe.json", 99,
          "its ids go up to 99, but model.vocab_size is 99: increase it to at least 100" },
        { "unigram.json", 100,
          "its ids go up to 100, but model.vocab_size is 100: increase it to at least 101" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        DIES(wrong[i].message,
             tokenizer_files_replace(text("%s/%s", root, wrong[i].name), wrong[i].vocab_size));
    DIES("warning: tokenizer", (tokenizer_files_replace(text("%s/bpe.json", root), 202), exit(1)));
}

/* ---- refusals -------------------------------------------------------------------------------- */

TEST(test_refusals)
{
    needs_fork();
    Run r;
    open_small(&r);
    save(&r, 1);
    const char *step = lasting(step_folder(&r, 1)),
               *target = lasting(text("%s/refused", r.config.save_folder));
    const struct {
        const char *damage, *dtype, *message;
    } table[] = {
        { "mkdir ../refused", "BF16", "refused exists already" },
        { "ln -s nothing ../refused", "BF16", "refused exists already" },
        { "mkdir -p x && mv model.safetensors x", "BF16", "the checkpoint is incomplete" },
        { "printf 5 | dd of=model.safetensors conv=notrunc bs=1 seek=9000 2>/dev/null", "BF16",
          "has the checksum" },
        { "sed -i 's/\"num_hidden_layers\": 2/\"num_hidden_layers\": 3/' config.json", "BF16",
          "no tensor model.layers.2." },
        { "sed -i 's/\"num_hidden_layers\": 2/\"num_hidden_layers\": 1/' config.json", "BF16",
          "tensor model.layers.1." },
        { "sed -i 's/\\(\"vocab_size\": \\)/\\11/' config.json", "BF16",
          "according to config.json it needs" },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        shell(text("cd %s && cp -r step1 safe && cd step1 && %s", r.config.save_folder,
                   table[i].damage));
        DIES(table[i].message,
             export_folder(step, NULL, target, table[i].dtype, CHECKPOINT_FILE_BYTES));
        assert_true(i < 2 || !exists(target));
        shell(text("cd %s && rm -rf refused step1 && mv safe step1", r.config.save_folder));
    }
    /* a folder that the export did not write, here the source */
    shell(text("rm -rf %s.tmp && cp -r %s %s.tmp", target, step, target));
    DIES("refused.tmp exists and is not from an interrupted export",
         export_folder(text("%s.tmp", target), NULL, target, "BF16", CHECKPOINT_FILE_BYTES));
    expect_files(text("%s.tmp", target),
                 "config.json config.yaml model.safetensors optimizer-00001.states trainer.json");
    shell(text("rm -r %s.tmp && touch %s.tmp", target, target));
    DIES("refused.tmp exists and is not from an interrupted export",
         export_folder(step, NULL, target, "BF16", CHECKPOINT_FILE_BYTES));
    DIES("there is no such folder",
         export_folder(text("%s/no", root), NULL, target, "BF16", CHECKPOINT_FILE_BYTES));
    DIES("no config.json and no checkpoint in it",
         export_folder(root, NULL, target, "BF16", CHECKPOINT_FILE_BYTES));
    close_run(&r);
    release();
}

/* Values outside of the range of the type, and NaN. */
TEST(test_values)
{
    needs_fork();
    Run r;
    open_small(&r);
    const char *target = lasting(text("%s/values", r.config.save_folder));
    const float big[] = { 65520, 0x1.ffp127f, NAN };
    static const char *const dtype[] = { "F16", "BF16", "F32" };
    static const char *const message[] = { "holds 65520, more than F16 can store: use --dtype=bf16",
                                           "more than BF16 can store: use --dtype=f32",
                                           "holds a value that is not finite" };
    for (int i = 0; i < 3; i++) {
        const float safe = i < 2 ? big[i] : 1;
        device_put(r.store.shard[0].slice[TRAINED].stored.data, &safe, sizeof safe);
        save(&r, i);
        if (i == 2) { /* our checkpoints never contain NaN */
            SafeFile *f = safetensors_open(text("%s/model.safetensors", step_folder(&r, 2)));
            FILE *file = fopen(f->path, "r+");
            assert_true(
                fseek(file,
                      (long)(f->data + safetensors_find(f, "model.embed_tokens.weight")->begin),
                      SEEK_SET) == 0);
            assert_true(fwrite(&big[2], sizeof big[2], 1, file) == 1 && fclose(file) == 0);
            safetensors_close(f);
        }
        DIES(message[i],
             export_folder(step_folder(&r, i), NULL, target, dtype[i], CHECKPOINT_FILE_BYTES));
        assert_false(exists(target));
    }
    /* values.tmp existed before */
    export_folder(step_folder(&r, 0), NULL, target, "BF16", CHECKPOINT_FILE_BYTES);
    assert_false(exists(text("%s.tmp", target)));
    close_run(&r);
    release();
}

static void run_with(const char *a, const char *b, const char *c)
{
    char *argv[] = { "train", strdup(a), b ? strdup(b) : NULL, c ? strdup(c) : NULL, NULL };
    const int argc = 2 + (b != NULL) + (c != NULL);
    assert_true(export_options_asked(argc, argv));
    export_run(argc, argv);
}

TEST(test_arguments)
{
    needs_fork();
    DIES("the folder to write is missing", run_with("--export=x", NULL, NULL));
    DIES("'--export' names no folder", run_with("--export", "x", "y"));
    DIES("'--export=' names no folder", run_with("--export=", "x", NULL));
    DIES("no configuration file such as x.yaml", run_with("x.yaml", "--export=x", NULL));
    DIES("--dtype=fp4: dtype: expected bf16|f16|f32|fp8|int8|int4|nf4, found 'fp4'",
         run_with("--export=x", "--dtype=fp4", "y"));
    DIES("unexpected argument 'z'", run_with("--export=x", "y", "z"));
    DIES("'--export=z' is given twice", run_with("--export=x", "y", "--export=z"));
    DIES("'--save_folder=z' is not an option", run_with("--export=x", "y", "--save_folder=z"));
    char *help[] = { "train", "--export=x", "--help" },
         *run[] = { "train", "x.yaml", "--exports=y" };
    assert_false(export_options_asked(3, help) || export_options_asked(3, run));
}

/* ---- interruptions --------------------------------------------------------------------------- */

/* The disk accepts only `bytes` bytes of a file. */
static void export_on_full_disk(const char *source, const char *target, const char *dtype,
                                rlim_t bytes)
{
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){ bytes, bytes });
    export_folder(source, NULL, target, dtype, CHECKPOINT_FILE_BYTES);
}

/* The signal of the first byte after the limit kills the process. */
static void killed(const char *source, const char *target)
{
    setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 4096, 4096 });
    export_folder(source, NULL, target, "F32", CHECKPOINT_FILE_BYTES);
}

TEST(test_interrupted)
{
    needs_fork();
    Run r;
    open_small(&r);
    save(&r, 1);
    const char *step = lasting(step_folder(&r, 1)),
               *target = lasting(text("%s/stopped", r.config.save_folder));
    for (rlim_t bytes = 0; bytes <= 32768; bytes += 16384) {
        DIES("stopped.tmp/", export_on_full_disk(step, target, "F32", bytes));
        DIES("stopped.tmp/", export_on_full_disk(step, target, "fp8", bytes));
    }
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        killed(step, target);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && !exists(target) && exists(text("%s.tmp", target)));

    /* simulates another process that writes the same folder */
    FILE *other = fopen(text("%s.tmp", target), "re");
    assert_true(other && flock(fileno(other), LOCK_EX) == 0);
    DIES("another process is writing it",
         export_folder(step, NULL, target, "F32", CHECKPOINT_FILE_BYTES));
    fclose(other);
    DIES("this is the output of an interrupted export",
         export_folder(text("%s.tmp", target), NULL, text("%s/x", root), "F32",
                       CHECKPOINT_FILE_BYTES));
    shell(text("touch %s.tmp/left-over", target));
    export_folder(step, NULL, target, "F32", CHECKPOINT_FILE_BYTES);
    assert_false(exists(text("%s.tmp", target)));
    expect_files(target, "config.json model.safetensors");
    close_run(&r);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
