/* Runs that start from a published model: without a configuration file, or with one without a model
 * section; and messages for an unreadable load_path. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "model/formats/loadable.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/try_config.h"

#define LONG_LLAMA \
    "\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"num_hidden_layers\": 2, " \
    "\"vocab_size\": 65537, \"num_attention_heads\": 4, \"intermediate_size\": 96, " \
    "\"max_position_embeddings\": 131072"

static char from[128];

/* Writes a file into the folder of load_path. */
static void write_file(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", try_folder, name);
    try_write(path, text);
}

/* Starts a run without a configuration file: arguments replace it. */
static Config *load_without_file(const char *a, const char *b, const char *c)
{
    char saved[sizeof try_path];
    strcpy(saved, try_path);
    strcpy(try_path, from);
    Config *config = try_load(1, a, b, c, NULL);
    strcpy(try_path, saved);
    return config;
}

TEST(test_without_file)
{
    write_file("config.json", "{" LONG_LLAMA ", \"eos_token_id\": null}");
    write_file("generation_config.json", "{\"eos_token_id\": [7, 9], \"pad_token_id\": 3}");
    Config *c = load_without_file("--data.paths=a.npy", "--seed=3", NULL);
    assert_int_equal(c->seed, 3);
    assert_int_equal(c->model.d_model, 64);
    assert_int_equal(c->model.max_sequence_length, 4096);
    assert_int_equal(c->model.eos_token_id, 7);
    assert_int_equal(c->model.pad_token_id, 3);
    assert_int_equal(c->data.files.itemsize, 4);
    assert_int_equal(c->global_train_batch_size, 32);
    assert_int_equal(c->device_train_microbatch_size, 1);
    assert_true(c->max_duration.epochs == 1 && c->optimizer.lr == 2e-5 &&
                c->optimizer.weight_decay == 0);
    assert_true(c->scheduler.warmup_fraction == 0.03 && c->scheduler.t_warmup == 0 &&
                c->scheduler.alpha_f == 0);
    try_contains(c->changes, "model.max_sequence_length=4096");
    try_contains(c->changes, "data.memmap_dtype=uint32");
    write_file("saved.yaml", c->text);
    config_free(c);

    char saved[sizeof try_path]; /* loading the saved form gives the same configuration */
    strcpy(saved, try_path);
    snprintf(try_path, sizeof try_path, "%s/saved.yaml", try_folder);
    c = try_load(1, NULL, NULL, NULL, NULL);
    assert_true(c->scheduler.warmup_fraction == 0.03 && c->model.max_sequence_length == 4096 &&
                c->data.files.itemsize == 4);
    config_free(c);
    strcpy(try_path, saved);

    c = load_without_file("--data={paths: a.npy, memmap_dtype: uint16}",
                          "--model.max_sequence_length=8192",
                          "--scheduler={warmup_fraction: null, t_warmup: 5}");
    assert_int_equal(c->model.max_sequence_length, 8192);
    assert_int_equal(c->data.files.itemsize, 2);
    assert_int_equal(c->scheduler.t_warmup, 5);
    config_free(c);
}

TEST(test_nothing_given)
{
    static const struct {
        const char *first, *second, *words;
    } list[] = {
        { "--seed=1", NULL, "needs --load_path=FOLDER and --data.paths='[shards/*.npy]'" },
        { "--seed=1", "--data.paths=a.npy", "it needs --load_path=FOLDER\n" },
        { "--seed=1", NULL,
          "'--seed=1' is not a configuration file. The first argument must be one: ./train "
          "configs/tiny.yaml" },
        { from, NULL, "command line: no training data: give data.paths" },
        { from, "--data.paths=a.npy",
          "sequences have 4096 tokens, although the model supports 131072" },
        { from, "--scheduler.t_warmup=5",
          "--scheduler.t_warmup=0 or --scheduler.warmup_fraction=null" },
    };
    char message[8192], saved[sizeof try_path];
    strcpy(saved, try_path);
    write_file("config.json", "{" LONG_LLAMA "}");
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        strcpy(try_path, list[i].first);
        try_printed(message, sizeof message, 2, 1, list[i].second,
                    i == 5 ? "--data.paths=a.npy" : NULL);
        try_contains(message, list[i].words);
    }
    strcpy(try_path, saved);
}

/* The sequence length of the model, or of the run that saved it. */
TEST(test_length)
{
    try_write_hf("{" TRY_LLAMA "}");
    Config *c = try_load(1, from, NULL, NULL, NULL);
    assert_int_equal(c->model.max_sequence_length, 512);
    assert_int_equal(c->data.files.itemsize, 2);
    config_free(c);
    try_write_hf("{" LONG_LLAMA "}");
    write_file("trainer.json", "{}");
    write_file("config.yaml", "model:\n  max_sequence_length: 16384\n");
    c = try_load(1, from, NULL, NULL, NULL);
    assert_int_equal(c->model.max_sequence_length, 16384);
    config_free(c);
    write_file("config.yaml",
               "recipe: fp8\nformat: {head: e5m2, fast: none, scales: null, moment1: e4m3/128}\n"
               "activations: {keep: block}\nfp8: {forward: saved}\ndevice_train_microbatch_size: "
               "8\ndevice_eval_batch_size: 24\n");
    static const struct {
        const char *more[2], *recipe;
        DType head;
        int sequences, batch;
    } runs[] = {
        /* evaluation uses the settings of that run, training the settings given here */
        { { "--eval_only" }, "fp8", E5M2, 8, 24 },
        { { "--eval_only", "--recipe=bf16" }, "bf16", BF16, 8, 24 },
        { { "--eval_only", "--device_train_microbatch_size=2" }, "fp8", E5M2, 2, 2 },
        { { "--eval_only", "--device_eval_batch_size=16" }, "fp8", E5M2, 8, 16 },
        { { "--eval_only", "--format.head=bf16" }, "fp8", BF16, 8, 24 },
        { { "--data.paths=a.npy" }, "coat", E5M2, 1, 1 },
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        c = load_without_file("--evaluators=[{label: v, data: {paths: a.npy}}]", runs[i].more[0],
                              runs[i].more[1]);
        assert_string_equal(c->recipe.name, runs[i].recipe);
        assert_int_equal(c->recipe.head.dtype, runs[i].head);
        const Recipe *row = recipe_find(runs[i].recipe);
        /* `fast`: the key's name in earlier versions */
        const bool same = strcmp(row->name, "fp8") == 0;
        assert_int_equal(c->recipe.keep, same ? KEEP_BLOCK : row->keep);
        assert_int_equal(c->recipe.forward, same ? FROM_SAVED : row->forward);
        assert_int_equal(c->recipe.fast, same ? FAST_NONE : row->fast);
        assert_int_equal(c->device_train_microbatch_size, runs[i].sequences);
        assert_int_equal(c->device_eval_batch_size, runs[i].batch);
        assert_int_equal(c->recipe.moment1.dtype, recipe_find(runs[i].recipe)->moment1.dtype);
        config_free(c);
    }
    write_file("config.yaml", "seed: 1\nrecipe: coat9\n");
    DIES("/config.yaml:2: this build has no recipe 'coat9'",
         load_without_file("--evaluators=[{label: v, data: {paths: a.npy}}]", "--eval_only", NULL));
    char command[256];
    snprintf(command, sizeof command,
             "cd %s && rm trainer.json config.yaml config.json generation_config.json", try_folder);
    assert_int_equal(system(command), 0);
}

/* files: made in a folder. given: the path below it that is used as load_path; with a slash,
 * another path. */
TEST(test_what_it_is)
{
    static const struct {
        const char *files, *given, *words;
    } list[] = {
        { "", "allenai/OLMo-2-7B",
          "hf download allenai/OLMo-2-7B --local-dir OLMo-2-7B\n  --load_path=OLMo-2-7B" },
        { "", "/no/such/folder", "load_path /no/such/folder: there is no such folder" },
        { "x.gguf", "x.gguf", "gguf_file='x.gguf').save_pretrained" },
        { "pytorch_model.bin", "pytorch_model.bin", "this is a PyTorch file" },
        { "pytorch_model.bin", "", "its weights are PyTorch files; only safetensors can be read" },
        { "pytorch_model.bin.index.json config.json", "", "AutoModelForCausalLM as M" },
        { "consolidated.00.pth", "", "convert_llama_weights_to_hf --input_dir %s " },
        { "consolidated.00.pth", "consolidated.00.pth",
          "convert_llama_weights_to_hf --input_dir %s " },
        { "model.pt config.yaml", "", "python3 scripts/convert_olmo.py %s OUTPUT" },
        { "model.pt", "model.pt", "python3 scripts/convert_olmo.py %s OUTPUT" },
        { "model.safetensors config.yaml", "", "python3 scripts/convert_olmo.py %s OUTPUT" },
        { "model.safetensors config.json", "model.safetensors",
          "this is a file; give the folder with all files of the model" },
        { "config.yaml && mkdir latest && touch latest/config.json", "",
          "newest checkpoint is --load_path=%s/latest" },
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char command[512], folder[128], path[256], words[512];
        snprintf(folder, sizeof folder, "%s/what%zu", try_folder, i);
        snprintf(command, sizeof command, "mkdir %s && cd %s && touch x %s", folder, folder,
                 list[i].files);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof path,
                 strchr(list[i].given, '/') ? "%.0s%s"
                 : *list[i].given           ? "%s/%s"
                                            : "%s%s",
                 folder, list[i].given);
        snprintf(words, sizeof words, list[i].words, folder);
        DIES(words, loadable_check(NULL, path));
    }
    static const char *const fine[] = { "model.safetensors",
                                        "model.safetensors config.yaml config.json",
                                        "model.safetensors.index.json pytorch_model.bin" };
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        char command[512], folder[128];
        snprintf(folder, sizeof folder, "%s/fine%zu", try_folder, i);
        snprintf(command, sizeof command, "mkdir %s && cd %s && touch %s", folder, folder, fine[i]);
        assert_int_equal(system(command), 0);
        loadable_check(NULL, folder);
    }
}

static int begin(void **state)
{
    const int status = try_make_folder(state);
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    return status;
}

int main(void)
{
    return run_all_tests(begin, try_remove_folder);
}
