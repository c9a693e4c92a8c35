/* Turns the command line into a Config, in layers: the table's defaults < load_path (its
 * config.json, unless the file has model.d_model or model.n_layers; to evaluate a checkpoint also
 * its run's config.yaml) < the recipe's columns < the YAML file < the command line. Then derived
 * values are computed, and the whole configuration is written as YAML (resolved.c). The keys are
 * rows of config_keys.c; only functions that read or check several keys together name single
 * keys. */
#include "model/config/config_load.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/config/changes.h"
#include "model/config/check_data.h"
#include "model/config/check_experts.h"
#include "model/config/check_images.h"
#include "model/config/check_distill.h"
#include "model/config/check_policy.h"
#include "model/config/check_preference.h"
#include "model/config/check_lora.h"
#include "model/config/check_model.h"
#include "model/config/check_recipe.h"
#include "model/config/check_run.h"
#include "model/config/data_mixture.h"
#include "model/config/dry_run.h"
#include "model/config/evaluators.h"
#include "model/config/extend.h"
#include "model/config/help.h"
#include "model/config/load_folder.h"
#include "model/config/names.h"
#include "model/config/resolved.h"
#include "model/formats/adapter.h"
#include "model/formats/hf.h"
#include "model/formats/loadable.h"
#include "model/formats/pointer.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"

/* Keys that decide where the model comes from, and which other keys are read. */
static const char FIRST[] = "dry_run|eval_only|generate|score|run_name|save_folder|try_load_latest_"
                            "save|load_path|extend|lora";

/* Reads every key once, after the layers below it: first the keys of FIRST, then the other keys on
 * top of load_path, and last format.*, activations.* and fp8.* on top of the recipe's columns
 * (check_recipe.c). Evaluators are a list. */
static void read_keys(Reader *r, bool first)
{
    for (int i = 0; i < r->root->num_children; i++) {
        YamlNode *n = r->root->child[i];
        reader_check_key(n);
        if (!text_is_among(n->key, "evaluators|format|activations|fp8") &&
            text_is_among(n->key, FIRST) == first)
            reader_apply(r, n, n->key, r->s);
    }
}

static void check_complete(Reader *r, bool from_hf)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        bool known =
            k->default_text || (from_hf && strncmp(k->name, "model.", strlen("model.")) == 0);
        if (known || key_element_prefix(k->name) || reader_given(r, k->name))
            continue;
        load_folder_check_given(r, r->file);
        die("%s: %s is missing: %s", r->file, k->name, k->help);
    }
}

/* The checkpoint that the run continues comes before load_path, whose folder may no longer
 * exist. */
static void find_load_folder(Reader *r, char *(*latest_of)(const char *save_folder))
{
    Config *c = &r->s->c;
    pointer_replace(&c->load_path);
    pointer_replace(&c->model.lora.base_path);
    load_folder_check_path(r);
    check_run_choose_save_folder(c);
    watchdog_mark("looking for the latest checkpoint", -1);
    c->load_folder = c->try_load_latest_save ? latest_of(c->save_folder) : NULL;
    c->continues = c->load_folder != NULL;
    if (!c->continues) {
        extend_find(r);
        c->load_folder = xstrdup(c->load_path);
    }
    watchdog_mark("reading the configuration", -1);
}

/* Reads the architecture from the config.json of load_folder, or of the base model if load_folder
 * has adapters. Returns false if there is no load_path. */
static bool read_hf(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->load_path)
        return false;
    if (!c->continues)
        loadable_check(reader_where(r, "load_path"), c->load_path);
    hf_read(&c->model, adapter_is(c->load_folder) ? c->model.lora.base_path : c->load_folder);
    load_folder_complete(r);
    r->s->layer_norm_type = c->model.norm.kind == RMS_NORM ? NORM_RMS : NORM_DEFAULT;
    r->s->rope_type =
        c->model.rope_scaling.type == ROPE_DEFAULT ? NOT_GIVEN : (int)c->model.rope_scaling.type;
    r->s->architecture = strdup(c->model.architecture->class);
    return true;
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* What messages call the file if a run has only a command line. */
#define COMMAND_LINE "the command line"

static bool is_question(const char *argument)
{
    return strncmp(argument, "--help", 6) == 0 || strcmp(argument, "-h") == 0 ||
           strcmp(argument, "--version") == 0 || strcmp(argument, "--completion") == 0;
}

/* All ranks run this, so that all ranks die on a wrong key; rank 0 prints. */
static Config *answer(const char *argument)
{
    const char *name = strncmp(argument, "--help=", 7) == 0 && argument[7] ? argument + 7 : NULL;
    FILE *f = comm_rank() == 0 ? stdout : fopen("/dev/null", "w");
    if (!f)
        die("/dev/null: cannot write: %m");
    if (strcmp(argument, "--version") == 0)
        help_version(f);
    else if (strcmp(argument, "--completion") == 0)
        help_completion(f);
    else if (name && strcmp(name, "markdown") == 0)
        help_markdown(f);
    else
        help_print(f, name);
    if (f != stdout)
        fclose(f);
    return NULL;
}

/* Merges the arguments into the file's tree. Aliases in both are first replaced by the table's
 * names. */
static void read_arguments(YamlNode *root, int count, char **argument)
{
    YamlNode *all = yaml_new(YAML_MAP, NULL, NULL, COMMAND_LINE, 0);
    for (int i = 0; i < count; i++)
        yaml_override(all, argument[i]);
    names_check(root);
    names_check(all);
    yaml_free(all);
    names_rename(root);
    for (int i = 0; i < count; i++) {
        yaml_override(root, argument[i]);
        names_rename(root);
    }
}

Config *config_load(int argc, char **argv, int world, char *(*latest)(const char *save_folder))
{
    if (argc < 2) {
        if (comm_rank() == 0)
            help_usage(stderr);
        return NULL;
    }
    for (int i = 1; i < argc; i++)
        if (is_question(argv[i]))
            return answer(argv[i]);
    watchdog_mark("reading the configuration", -1);
    const bool has_file = argv[1][0] != '-';
    Settings *s = xcalloc(1, sizeof *s);
    Reader r = { .s = s,
                 .root = has_file ? yaml_load(argv[1]) : load_folder_without_file(),
                 .file = has_file ? argv[1] : COMMAND_LINE,
                 .world = world };
    r.notes = xtext(&r.notes_text);
    const bool has_model =
        yaml_find(r.root, "model.d_model") || yaml_find(r.root, "model.n_layers");
    read_arguments(r.root, argc - (has_file ? 2 : 1), argv + (has_file ? 2 : 1));
    if (!has_file)
        load_folder_check_command_line(&r, argv[1]);

    reader_defaults(s, "");
    read_keys(&r, true);
    find_load_folder(&r, latest);
    check_lora_find_base(&r);
    if (!has_file)
        check_lora_choose_rate(&r);
    const bool from_hf = !has_model && read_hf(&r);
    read_keys(&r, false);
    check_complete(&r, from_hf);
    dry_run_choose_ranks(&r);
    check_model(&r, from_hf);
    check_recipe_optimizer(&r);
    check_recipe(&r);
    check_lora(&r);
    check_experts(&r);
    check_images(&r);
    check_data(&r);
    check_images_data(&r);
    check_run(&r);
    check_preference(&r);
    check_distill(&r);
    check_policy(&r);
    evaluators_read(&r);
    check_model_trainable(&r);
    fclose(r.notes);
    if (r.num_notes)
        warn("%s: without effect here: %s", r.file, r.notes_text);
    free(r.notes_text);
    s->c.changes = changes_text(&r, from_hf);
    yaml_free(r.root);
    resolved_write(s);
    return &s->c;
}

static void free_texts(char **texts, int count)
{
    for (int i = 0; i < count; i++)
        free(texts[i]);
    free(texts);
}

void config_free(Config *c)
{
    Settings *s = (Settings *)c;
    if (!c)
        return;
    reader_free_element(s, "");
    data_mixture_free(c);
    for (int i = 0; i < c->num_eval; i++) {
        free(c->eval[i].label);
        free(c->eval[i].where);
        free_texts(c->eval[i].files.paths, c->eval[i].files.num_paths);
        free_texts(c->eval[i].files.label_mask_paths, c->eval[i].files.num_label_mask_paths);
        free_texts(c->eval[i].files.image_paths, c->eval[i].files.num_image_paths);
        free(c->eval[i].files.image_features);
    }
    free(c->eval);
    free(c->load_folder);
    free(c->text);
    free(c->changes);
    free(s);
}
