/* Settings that follow from the folder of load_path, also for runs without a configuration file. */
#include "model/config/load_folder.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/config/names.h"
#include "model/formats/file.h"
#include "model/keys/key.h"

/* tokens of a sequence if max_sequence_length is not given and the model allows more */
enum { USUAL_LENGTH = 4096 };

/* ---- without a file -------------------------------------------------------------------------- */

static const char WITHOUT_FILE[] = "a run without a configuration file";

/* The settings with which Alpaca, Vicuna and Tulu were trained, except for the batch: 32 full
 * sequences hold about 128 conversations. */
YamlNode *load_folder_without_file(void)
{
    return yaml_parse("{max_duration: 1ep, global_train_batch_size: 32, "
                      "device_train_microbatch_size: 1, max_grad_norm: 1.0,\n"
                      " optimizer: {learning_rate: 2e-5, eps: 1e-8, weight_decay: 0},\n"
                      " scheduler: {warmup_fraction: 0.03, warmup_min_lr: 0, alpha_f: 0}}",
                      WITHOUT_FILE);
}

void load_folder_check_given(const Reader *r, const char *where)
{
    if (!reader_given(r, "load_path") &&
        (reader_given(r, "generate") || reader_given(r, "eval_only") || reader_given(r, "score")))
        die("%s: there is no model; --load_path=FOLDER names a checkpoint or a Hugging Face folder",
            where);
}

void load_folder_check_command_line(const Reader *r, const char *first)
{
    if (reader_given(r, "load_path"))
        return;
    load_folder_check_given(r, first);
    const bool data = reader_given(r, "data.paths") || reader_given(r, "data.datasets") ||
                      reader_given(r, "data.mix") || reader_given(r, "dry_run");
    die("'%s' is not a configuration file. The first argument must be one: ./train "
        "configs/tiny.yaml %s. A run without a configuration file fine-tunes a model written by "
        "save_pretrained: it needs --load_path=FOLDER%s",
        first, first, data ? "" : " and --data.paths='[shards/*.npy]'");
}

/* ---- what follows from the model ------------------------------------------------------------- */

YamlNode *load_folder_config(const char *folder)
{
    if (!file_is_in(folder, "trainer.json") || !file_is_in(folder, "config.yaml"))
        return NULL;
    char *path = xasprintf("%s/config.yaml", folder);
    check_regular(path);
    YamlNode *root = yaml_load(path);
    free(path);
    names_rename(root);
    return root;
}

/* The value of `key` in the configuration of the checkpoint's run; NULL: there is none. The caller
 * owns it. */
char *load_folder_trained_with(const char *folder, const char *key)
{
    YamlNode *root = load_folder_config(folder);
    const YamlNode *n = root ? yaml_find(root, key) : NULL;
    char *text = n && n->text ? xstrdup(n->text) : NULL;
    yaml_free(root);
    return text;
}

/* returns 0 if the length is not known */
static int trained_length(const char *folder)
{
    const ConfigKey *k = key_find("model.max_sequence_length");
    char *text = load_folder_trained_with(folder, k->name);
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

/* Whether only training reads this column of a recipe. Evaluation stores all weights in `frozen`,
 * so an f32 in `frozen` must be kept. */
static bool is_unread(const char *name, const char *text)
{
    return text_is_among(name, "format.grads|format.moment1|format.moment2") ||
           (strcmp(name, "format.frozen") == 0 && text && strcmp(text, "f32") != 0);
}

/* Adds n, the value of `name` in a run's configuration, as a default below the user's settings. */
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

/* An evaluation must give the same numbers as the checkpoint's run. So it uses that run's recipe
 * with all changed columns, batch sizes, because sequences of a micro-batch share FP8 scales, and
 * masking of documents. Settings that the user gives take precedence. */
static void complete_evaluation(Reader *r, const char *folder)
{
    const bool recipe = !reader_given(r, "recipe"),
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
    YamlNode *run = load_folder_config(folder);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const YamlNode *n = run && list[i].wanted ? yaml_find(run, list[i].name) : NULL;
        if (n)
            take(r, list[i].name, n);
    }
    yaml_free(run);
}

void load_folder_complete(Reader *r)
{
    const char *folder = r->s->c.load_folder;
    if (r->s->c.eval_only)
        complete_evaluation(r, folder);
    ModelConfig *m = &r->s->c.model;
    const int known = m->max_sequence_length;
    if (m->vocab_size > UINT16_MAX + 1)
        r->s->memmap_dtype = UINT32;
    if (reader_given(r, "model.max_sequence_length"))
        return;
    const int trained = trained_length(folder);
    if (trained > 0)
        m->max_sequence_length = trained;
    else if (known > USUAL_LENGTH) {
        m->max_sequence_length = USUAL_LENGTH;
        warn("%s: sequences have %d tokens, although the model supports %d; for longer sequences, "
             "which need more memory, set --model.max_sequence_length",
             folder, USUAL_LENGTH, known);
    }
}

void load_folder_check_path(const Reader *r)
{
    const char *path = r->s->c.load_path;
    if (path && !*path)
        die("%s: load_path is empty; give a folder, '.' for the current one",
            reader_where(r, "load_path"));
    if (path && strstr(path, "://"))
        die("%s: load_path '%s' is remote; download the folder (hf download, aws s3 cp "
            "--recursive) and give its local path",
            reader_where(r, "load_path"), path);
}
