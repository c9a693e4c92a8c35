/* The folder of a run's model: runs without a configuration file, settings that follow from the
 * model of load_path, and messages about a load_path that cannot be read, with the command that
 * converts it. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/config/adapter.h"
#include "model/config/files.h"
#include "model/config/hf.h"
#include "model/config/pointer.h"
#include "model/config/table.h"

/* tokens of a sequence if none are given and the model allows more */
enum { USUAL_LENGTH = 4096 };

/* ---- without a file -------------------------------------------------------------------------- */

static const char WITHOUT_FILE[] = "a run without a configuration file";

/* As Alpaca, Vicuna and Tulu were trained, except for the batch: 32 full sequences hold about 128
 * conversations. */
YamlNode *config_without_file(void)
{
    return yaml_parse("{max_duration: 1ep, global_train_batch_size: 32, "
                      "device_train_microbatch_size: 1, max_grad_norm: 1.0,\n"
                      " optimizer: {learning_rate: 2e-5, eps: 1e-8, weight_decay: 0},\n"
                      " scheduler: {warmup_fraction: 0.03, warmup_min_lr: 0, alpha_f: 0}}",
                      WITHOUT_FILE);
}

void config_check_has_model(const Reader *r, const char *where)
{
    if (!config_given(r, "load_path") &&
        (config_given(r, "generate") || config_given(r, "eval_only")))
        die("%s: there is no model; --load_path=FOLDER names a checkpoint or a Hugging Face folder",
            where);
}

void config_check_command_line(const Reader *r, const char *first)
{
    if (config_given(r, "load_path"))
        return;
    config_check_has_model(r, first);
    const bool data = config_given(r, "data.paths") || config_given(r, "data.datasets") ||
                      config_given(r, "data.mix") || config_given(r, "dry_run");
    die("'%s' is no configuration file, which is the first argument: ./train configs/tiny.yaml %s. "
        "A run without one fine-tunes a "
        "model written by save_pretrained: it needs --load_path=FOLDER%s",
        first, first, data ? "" : " and --data.paths='[shards/*.npy]'");
}

/* ---- what follows from the model ------------------------------------------------------------- */

YamlNode *config_of_run(const char *folder)
{
    if (!file_is_in(folder, "trainer.json") || !file_is_in(folder, "config.yaml"))
        return NULL;
    char *path = xasprintf("%s/config.yaml", folder);
    check_regular(path);
    YamlNode *root = yaml_load(path);
    free(path);
    config_rename(root);
    return root;
}

/* The value of `key` in that configuration; NULL: there is none. The caller owns it. */
char *config_trained_with(const char *folder, const char *key)
{
    YamlNode *root = config_of_run(folder);
    const YamlNode *n = root ? yaml_find(root, key) : NULL;
    char *text = n && n->text ? xstrdup(n->text) : NULL;
    yaml_free(root);
    return text;
}

/* 0: unknown. */
static int trained_length(const char *folder)
{
    const ConfigKey *k = config_key("model.max_sequence_length");
    char *text = config_trained_with(folder, k->name);
    const long length = text ? strtol(text, NULL, 10) : 0;
    free(text);
    return (double)length >= k->min && (double)length <= k->max ? (int)length : 0;
}

/* Whether the user gives `key`, even as null. */
static bool is_asked(const Reader *r, const char *key)
{
    const YamlNode *n = yaml_find(r->root, key);
    return n && strcmp(n->file, WITHOUT_FILE) != 0;
}

/* Columns of a recipe that only training reads. Evaluation stores all weights in `frozen`, so an
 * f32 there must be kept. */
static bool is_unread(const char *name, const char *text)
{
    return text_is_among(name, "format.grads|format.moment1|format.moment2") ||
           (strcmp(name, "format.frozen") == 0 && text && strcmp(text, "f32") != 0);
}

/* Puts n, the value of `name` in a run's configuration, below the user's settings. */
static void take(Reader *r, const char *name, const YamlNode *n)
{
    for (int i = 0; n->kind == YAML_MAP && i < n->num_children; i++) {
        char *below = xasprintf("%s.%s", name, n->child[i]->key);
        take(r, below, n->child[i]);
        free(below);
    }
    if (n->kind != YAML_MAP && !is_asked(r, name) && !is_unread(name, n->text))
        yaml_put(r->root, name, yaml_copy(n, NULL));
}

/* An evaluation reproduces the numbers of the checkpoint's run. So the recipe and its columns, the
 * number of sequences that share scales, and the masking of documents are taken from the run unless
 * they are given. */
static void complete_evaluation(Reader *r, const char *folder)
{
    const bool recipe = !config_given(r, "recipe"),
               batches = !is_asked(r, "device_train_microbatch_size");
    const struct {
        const char *name;
        bool wanted;
    } list[] = {
        { "recipe", recipe },
        { "format", recipe },
        { "activations", recipe },
        { "fp8", recipe },
        { "data.generate_doc_lengths", true },
        { "device_train_microbatch_size", batches },
        { "device_eval_batch_size", batches },
    };
    YamlNode *run = config_of_run(folder);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const YamlNode *n = run && list[i].wanted ? yaml_find(run, list[i].name) : NULL;
        if (n)
            take(r, list[i].name, n);
    }
    yaml_free(run);
}

void config_complete_from_folder(Reader *r)
{
    const char *folder = r->s->c.load_folder;
    if (r->s->c.eval_only)
        complete_evaluation(r, folder);
    ModelConfig *m = &r->s->c.model;
    const int known = m->max_sequence_length;
    if (m->vocab_size > UINT16_MAX + 1)
        r->s->memmap_dtype = UINT32;
    if (config_given(r, "model.max_sequence_length"))
        return;
    const int trained = trained_length(folder);
    if (trained > 0)
        m->max_sequence_length = trained;
    else if (known > USUAL_LENGTH) {
        m->max_sequence_length = USUAL_LENGTH;
        warn("%s: using sequences of %d of the model's %d tokens; for longer ones, which take more "
             "memory, set "
             "--model.max_sequence_length",
             folder, USUAL_LENGTH, known);
    }
}

/* ---- what a load_path is --------------------------------------------------------------------- */

void config_check_load_path(const Reader *r)
{
    const char *path = r->s->c.load_path;
    if (path && !*path)
        die("%s: load_path is empty; give a folder, '.' for the current one",
            config_where(r, "load_path"));
    if (path && strstr(path, "://"))
        die("%s: load_path '%s' is remote; download the folder (hf download, aws s3 cp "
            "--recursive) and give its local path",
            config_where(r, "load_path"), path);
}

/* owner/name of letters, digits, dots, dashes and underscores. */
static bool may_be_hub_name(const char *path)
{
    int slashes = 0;
    for (const char *c = path; *c; c++) {
        slashes += *c == '/';
        if (!isalnum((unsigned char)*c) && !strchr("/._-", *c))
            return false;
    }
    return slashes == 1 && isalnum((unsigned char)path[0]) &&
           isalnum((unsigned char)strchr(path, '/')[1]);
}

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The folder of a file; the caller owns it. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return !slash          ? xstrdup(".")
           : slash == path ? xstrdup("/")
                           : xasprintf("%.*s", (int)(slash - path), path);
}

static _Noreturn void die_meta(const char *where, const char *folder)
{
    die("%s: these are weights in Meta's format. Convert them with transformers 4 and load the "
        "result:\n"
        "  python3 -m transformers.models.llama.convert_llama_weights_to_hf --input_dir %s "
        "--model_size 7B --llama_version 2 "
        "--output_dir OUTPUT",
        where, folder);
}

static _Noreturn void die_olmo(const char *where, const char *folder)
{
    die("%s: this is OLMo's own format. Convert it and load the result:\n"
        "  python3 scripts/convert_olmo.py %s OUTPUT",
        where, folder);
}

/* `more`: further arguments of from_pretrained. */
static _Noreturn void die_transformers(const char *where, const char *what, const char *folder,
                                       const char *more)
{
    die("%s: %s; only safetensors can be read. Save it again with transformers and load the "
        "result:\n"
        "  python3 -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        "[X.from_pretrained('%s'%s).save_pretrained('OUTPUT') for X in (M, T)]\"",
        where, what, folder, more);
}

static _Noreturn void die_file(const char *where, const char *path, const char *key)
{
    char *folder = folder_of(path), *more = xasprintf(", gguf_file='%s'", name_of(path));
    if (text_ends_with(path, ".gguf"))
        die_transformers(where, "this is a GGUF file", folder, more);
    if (text_ends_with(path, ".bin"))
        die_transformers(where, "this is a PyTorch file", folder, "");
    if (text_ends_with(path, ".pth"))
        die_meta(where, folder);
    if (text_ends_with(path, ".pt"))
        die_olmo(where, folder);
    die("%s: this is a file; give the folder with all files of the model: --%s=%s", where, key,
        folder);
}

/* Dies if the folder has a known other format. `key`: the key that names the folder. */
static void die_of_format(const char *where, const char *key, const char *folder)
{
    if (file_is_in(folder, "pytorch_model.bin") ||
        file_is_in(folder, "pytorch_model.bin.index.json"))
        die_transformers(where, "its weights are PyTorch files", folder, "");
    if (file_is_in(folder, "consolidated.00.pth"))
        die_meta(where, folder);
    if (file_is_in(folder, "model.pt"))
        die_olmo(where, folder);
    char *pointer = xasprintf("%s/latest", folder), *latest = pointer_follow(pointer);
    if (latest || file_is_in(folder, "latest/config.json") ||
        file_is_in(folder, "latest/adapter_config.json"))
        die("%s: this is the save_folder of a run; its newest checkpoint is --%s=%s/latest", where,
            key, folder);
    if (file_is_in(folder, "model_and_optim"))
        die("%s: this is a checkpoint of OLMo-core. Convert it with its "
            "src/examples/huggingface/convert_checkpoint_to_hf.py and "
            "load the result",
            where);
    free(pointer);
}

/* `key`: the key that names the folder. */
static void check_folder(const char *where, const char *key, const char *folder)
{
    struct stat status;
    if (stat(folder, &status) != 0 && may_be_hub_name(folder))
        die("%s: there is no such folder; if this is a name on the Hugging Face hub, download it "
            "and give the folder:\n"
            "  hf download %s --local-dir %s\n  --%s=%s",
            where, folder, name_of(folder), key, name_of(folder));
    if (stat(folder, &status) != 0)
        die("%s: %s; give its folder: --%s=FOLDER", where,
            errno == ENOENT ? "there is no such folder" : strerror(errno), key);
    if (!S_ISDIR(status.st_mode))
        die_file(where, folder, key);
}

static void check_model(const char *where, const char *key, const char *load_path)
{
    const bool described =
        file_is_in(load_path, "config.json") || file_is_in(load_path, "trainer.json");
    const bool weights = file_is_in(load_path, "model.safetensors") ||
                         file_is_in(load_path, "model.safetensors.index.json");
    if (!described && file_is_in(load_path, "config.yaml") &&
        (weights || file_is_in(load_path, "model.pt")))
        die_olmo(where, load_path);
    if (!weights)
        die_of_format(where, key, load_path);
}

static void check_adapter(const char *where, const char *folder)
{
    if (file_is_in(folder, "adapter_model.safetensors"))
        return;
    if (file_is_in(folder, "adapter_model.bin"))
        die("%s: its adapters are a PyTorch file; only safetensors can be read. Save them again "
            "with PEFT and load the result:\n"
            "  python3 -c \"from peft import AutoPeftModelForCausalLM as M; "
            "M.from_pretrained('%s').save_pretrained('OUTPUT')\"",
            where, folder);
    die("%s: there is an adapter_config.json, but no adapter_model.safetensors; fetch or copy the "
        "folder again",
        where);
}

void config_check_loadable(const char *where, const char *load_path)
{
    char *setting = xasprintf("%s%sload_path %s", where ? where : "", where ? ": " : "", load_path);
    check_folder(setting, "load_path", load_path);
    if (adapter_is(load_path))
        check_adapter(setting, load_path);
    else
        check_model(setting, "load_path", load_path);
    free(setting);
}

void config_check_base(const char *where, const char *base_path)
{
    check_folder(where, "lora.base_path", base_path);
    if (adapter_is(base_path))
        die("%s: that is a folder of adapters; their base must be a whole model: "
            "--lora.base_path=FOLDER",
            where);
    check_model(where, "lora.base_path", base_path);
    if (!file_is_in(base_path, "config.json"))
        die("%s: there is no config.json; expected a checkpoint stepN or a folder written by "
            "save_pretrained: "
            "--lora.base_path=FOLDER",
            where);
}
