/* From the command line to a Config, in layers: the table's defaults < load_path (its config.json,
 * unless the file has model.d_model or model.n_layers; to evaluate a checkpoint also its run's
 * config.yaml) < the recipe's columns < the YAML file < the command line. Then derived values;
 * finally the whole configuration is written as YAML (text.c). The keys are rows of table.c;
 * functions that read or check several keys together know single ones. */
#include "model/config/load.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "kernels/runtime/watchdog.h"
#include "model/config/adapter.h"
#include "model/config/hf.h"
#include "model/config/pointer.h"
#include "model/config/table.h"

/* ---- asking ---------------------------------------------------------------------------------- */

bool config_given(const Reader *r, const char *name)
{
    const YamlNode *n = yaml_find(r->root, name);
    return n && (n->kind != YAML_SCALAR || n->text);
}

const char *config_where(const Reader *r, const char *name)
{
    const YamlNode *n = yaml_find(r->root, name);
    return n ? yaml_where(n) : r->file;
}

void config_note(Reader *r, const char *format, ...)
{
    va_list args;
    fputs(r->num_notes++ ? ", " : "", r->notes);
    va_start(args, format);
    vfprintf(r->notes, format, args);
    va_end(args);
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool is_section(const char *name)
{
    size_t length = strlen(name);
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (strncmp(k->name, name, length) == 0 && k->name[length] == '.')
            return true;
    return false;
}

static _Noreturn void unknown(const YamlNode *n, const char *name)
{
    config_refuse_foreign(yaml_where(n), name);
    const char *near = config_suggest(name);
    if (near)
        die("%s: unknown key '%s'; did you mean '%s'?", yaml_where(n), name, near);
    die("%s: unknown key '%s'; ./train --help lists all. scripts/convert_config.py converts files "
        "of other programs",
        yaml_where(n), name);
}

/* Null for a section: --model.rope_scaling=null resets the values of a loaded model. A section of
 * the top level is left as it is: `model: null` takes the whole model from load_path. */
static void forget_section(void *holder, const char *name)
{
    const size_t length = strlen(name);
    if (!strchr(name, '.'))
        return;
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (strncmp(k->name, name, length) == 0 && k->name[length] == '.')
            value_default(holder, k);
}

/* A dot between keys, or [ before an element, is only allowed on the command line and in the
 * table. */
static void check_key(const YamlNode *n)
{
    if (strchr(n->key, '['))
        die("%s: '%s': an element of a list cannot be changed on its own; give the whole list, as "
            "in "
            "--evaluators='[{label: val, data: {paths: [val.npy]}}]'",
            yaml_where(n), n->key);
    if (strchr(n->key, '.'))
        die("%s: '%s': dots are only for the command line; in a file write a section with the key "
            "indented below it",
            yaml_where(n), n->key);
}

void config_apply(Reader *r, YamlNode *n, const char *name, void *holder)
{
    if (!is_section(name)) {
        const ConfigKey *k = config_key(name);
        if (!k || (n->kind == YAML_MAP && strcmp(name, "tokenizer") == 0)) /* OLMo's section */
            unknown(n, name);
        if (config_is_unread(&r->s->c, name))
            return;
        if ((k->type & TYPE_MASK) == SECTIONS)
            return;
        yaml_expand_home(n);
        config_check_texts(n, name);
        if (!(k->type & FOLLOWS) || n->kind != YAML_SCALAR || n->text)
            value_parse(holder, k, n);
        return;
    }
    if (n->kind == YAML_SCALAR && !n->text) {
        forget_section(holder, name);
        return;
    }
    if (n->kind != YAML_MAP)
        die("%s: %s is a section, its keys go below it, indented; found '%s'", yaml_where(n), name,
            n->kind == YAML_LIST ? "a list" : n->text);
    for (int i = 0; i < n->num_children; i++) {
        char child[512];
        check_key(n->child[i]);
        snprintf(child, sizeof child, "%s.%s", name, n->child[i]->key);
        config_apply(r, n->child[i], child, holder);
    }
}

void config_apply_element(Reader *r, YamlNode *n, const char *prefix, void *holder)
{
    config_defaults(holder, prefix);
    for (int i = 0; i < n->num_children; i++) {
        char name[512];
        check_key(n->child[i]);
        snprintf(name, sizeof name, "%s%s", prefix, n->child[i]->key);
        config_apply(r, n->child[i], name, holder);
    }
}

static bool has_prefix(const char *name, const char *prefix)
{
    const size_t n = config_element(name);
    return n == strlen(prefix) && strncmp(name, prefix, n) == 0;
}

void config_defaults(void *holder, const char *prefix)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (has_prefix(k->name, prefix))
            value_default(holder, k);
}

void config_free_element(void *holder, const char *prefix)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (has_prefix(k->name, prefix))
            value_free(holder, k);
}

/* Keys that decide where the model comes from, and which other keys are read. */
static const char FIRST[] =
    "dry_run|eval_only|generate|run_name|save_folder|try_load_latest_save|load_path|extend|lora";

/* Every key is read once, after the layers below it: those of FIRST, then the others on top of
 * load_path, and last format.*, activations.* and fp8.* on top of the recipe's columns (recipe.c).
 * Evaluators are a list. */
static void read_keys(Reader *r, bool first)
{
    for (int i = 0; i < r->root->num_children; i++) {
        YamlNode *n = r->root->child[i];
        check_key(n);
        if (!text_is_among(n->key, "evaluators|format|activations|fp8") &&
            text_is_among(n->key, FIRST) == first)
            config_apply(r, n, n->key, r->s);
    }
}

static void check_complete(Reader *r, bool from_hf)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        bool known =
            k->default_text || (from_hf && strncmp(k->name, "model.", strlen("model.")) == 0);
        if (known || config_element(k->name) || config_given(r, k->name))
            continue;
        config_check_has_model(r, r->file);
        die("%s: %s is missing: %s", r->file, k->name, k->help);
    }
}

/* The checkpoint that the run continues comes before load_path, which may not exist any more. */
static void find_load_folder(Reader *r, char *(*latest_of)(const char *save_folder))
{
    Config *c = &r->s->c;
    pointer_replace(&c->load_path);
    pointer_replace(&c->model.lora.base_path);
    config_check_load_path(r);
    config_choose_save_folder(c);
    watchdog_mark("looking for the latest checkpoint", -1);
    c->load_folder = c->try_load_latest_save ? latest_of(c->save_folder) : NULL;
    c->continues = c->load_folder != NULL;
    if (!c->continues) {
        config_find_extended(r);
        c->load_folder = xstrdup(c->load_path);
    }
    watchdog_mark("reading the configuration", -1);
}

/* Reads the architecture from the config.json of load_folder, or of the base model if it has
 * adapters; false: no load_path. */
static bool read_hf(Reader *r)
{
    Config *c = &r->s->c;
    if (!c->load_path)
        return false;
    if (!c->continues)
        config_check_loadable(config_where(r, "load_path"), c->load_path);
    config_read_hf(&c->model,
                   adapter_is(c->load_folder) ? c->model.lora.base_path : c->load_folder);
    config_complete_from_folder(r);
    r->s->layer_norm_type = c->model.norm.kind == RMS_NORM ? NORM_RMS : NORM_DEFAULT;
    r->s->rope_type =
        c->model.rope_scaling.type == ROPE_DEFAULT ? NOT_GIVEN : (int)c->model.rope_scaling.type;
    r->s->architecture = strdup(c->model.architecture->class);
    return true;
}

/* ---- evaluators ------------------------------------------------------------------------------ */

/* Adds a set with the paths (at least one) and label masks of the evaluator e, defined at `n`;
 * takes ownership of both. */
static void add_eval_set(Settings *s, const YamlNode *n, Evaluator *e, const char *label,
                         char ***paths, int *count)
{
    Config *c = &s->c;
    const char *at = yaml_where(config_find_path(n, (*paths)[0]));
    for (int i = 0; i < c->num_eval; i++)
        if (strcmp(c->eval[i].label, label) == 0)
            die("%s: two validation sets are named '%s', and so would be their metrics; rename one",
                at, label);
    c->eval = xrealloc(c->eval, (c->num_eval + 1) * sizeof *c->eval);
    char *where = xasprintf("%s: evaluator '%s' (--evaluators=[] trains without)", at, label);
    EvalSet *set = &c->eval[c->num_eval++];
    *set = (EvalSet){ .label = strdup(label),
                      .where = where,
                      .downstream = e->type == EVALUATOR_DOWNSTREAM,
                      .files = e->files };
    set->files.paths = *paths;
    set->files.num_paths = *count;
    if (set->files.itemsize == NOT_GIVEN)
        set->files.itemsize = (int)s->memmap_dtype;
    if ((int)set->files.packing == NOT_GIVEN)
        set->files.packing = c->data.files.packing;
    if ((int)set->files.boundaries == NOT_GIVEN)
        set->files.boundaries = c->data.files.boundaries;
    e->files.label_mask_paths = NULL;
    e->files.num_label_mask_paths = 0;
    e->files.image_paths = NULL;
    e->files.num_image_paths = 0;
    e->files.image_features = NULL;
    *paths = NULL;
    *count = 0;
    config_check_image_files(c, &set->files, set->where, "data", set->downstream);
    if (!set->downstream)
        config_check_eval_documents(c, set);
}

static bool any_remote(char *const *paths, int count)
{
    for (int i = 0; i < count; i++)
        if (strstr(paths[i], "://"))
            return true;
    return false;
}

/* The sets of one evaluator: one per named dataset, or one with its own label. Remote ones are
 * listed in `remote`. */
static void read_evaluator(Reader *r, YamlNode *n, FILE *downstream, FILE *remote)
{
    Evaluator e = { 0 };
    if (n->kind != YAML_MAP)
        die("%s: an evaluator is a section with label and data.paths or data.datasets",
            yaml_where(n));
    config_apply_element(r, n, EVALUATOR_PREFIX, &e);
    if (!e.label)
        die("%s: this evaluator has no label", yaml_where(n));
    if (e.files.num_label_mask_paths > 0 && e.files.num_paths == 0)
        die("%s: evaluator '%s' has label_mask_paths, which are parallel to data.paths, but no "
            "data.paths; give each dataset its "
            "own evaluator, with a label, paths and label_mask_paths",
            yaml_where(n), e.label);
    const bool asks = e.type == EVALUATOR_DOWNSTREAM;
    if (asks && e.files.num_paths == 0)
        fprintf(downstream, " %s", e.label);
    else if (asks && (e.files.num_paths > 1 || e.files.num_label_mask_paths > 0))
        die("%s: evaluator '%s' has %d files; expected one file per downstream task, made by "
            "scripts/prepare_eval.py or "
            "make_choices.py",
            yaml_where(n), e.label, e.files.num_paths + e.files.num_label_mask_paths);
    else if (e.files.num_paths == 0 && e.num_datasets == 0)
        die("%s: evaluator '%s' has no data: give data.paths or data.datasets", yaml_where(n),
            e.label);
    else if (e.files.num_paths > 0 && any_remote(e.files.paths, e.files.num_paths))
        fprintf(remote, " %s", e.label);
    else if (e.files.num_paths > 0)
        add_eval_set(r->s, n, &e, e.label, &e.files.paths, &e.files.num_paths);
    for (int i = 0; i < e.num_datasets && !asks; i++) {
        NamedPaths *set = &e.datasets[i];
        if (any_remote(set->paths, set->num_paths))
            fprintf(remote, " %s", set->name);
        else if (set->num_paths > 0)
            add_eval_set(r->s, n, &e, set->name, &set->paths, &set->num_paths);
    }
    config_free_element(&e, EVALUATOR_PREFIX);
}

static void read_evaluators(Reader *r)
{
    YamlNode *list = r->s->c.generate ? NULL : yaml_find(r->root, "evaluators");
    if (list && (list->kind == YAML_MAP || (list->kind == YAML_SCALAR && list->text)))
        die("%s: evaluators is a list: `- label: name`, then indented `data:` with paths",
            yaml_where(list));
    char *text[2];
    FILE *downstream = xtext(&text[0]), *remote = xtext(&text[1]);
    for (int i = 0; list && i < list->num_children; i++)
        read_evaluator(r, list->child[i], downstream, remote);
    fclose(downstream);
    fclose(remote);
    if (*text[0])
        config_note(r, "downstream evaluators without data.paths (%s)", text[0] + 1);
    if (*text[1])
        config_note(r, "evaluators with remote data (%s)", text[1] + 1);
    free(text[0]);
    free(text[1]);
    if (r->s->c.eval_only && r->s->c.num_eval == 0 && !r->s->c.dry_run)
        die("%s: eval_only: there are no evaluators; scripts/prepare_eval.py makes a file with "
            "some",
            config_where(r, list ? "evaluators" : "eval_only"));
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* The file's name in messages if a run has only a command line. */
#define COMMAND_LINE "the command line"

static bool is_question(const char *argument)
{
    return strncmp(argument, "--help", 6) == 0 || strcmp(argument, "-h") == 0 ||
           strcmp(argument, "--version") == 0;
}

/* All ranks run this, so that all die on a wrong key; rank 0 prints. */
static Config *answer(const char *argument)
{
    const char *name = strncmp(argument, "--help=", 7) == 0 && argument[7] ? argument + 7 : NULL;
    FILE *f = comm_rank() == 0 ? stdout : fopen("/dev/null", "w");
    if (!f)
        die("/dev/null: cannot write: %m");
    if (strcmp(argument, "--version") == 0)
        config_print_version(f);
    else if (name && strcmp(name, "markdown") == 0)
        config_print_markdown(f);
    else
        config_print_help(f, name);
    if (f != stdout)
        fclose(f);
    return NULL;
}

/* Merges the arguments into the file's tree; keys have the table's names afterwards, whatever each
 * of both calls them. */
static void read_arguments(YamlNode *root, int count, char **argument)
{
    YamlNode *all = yaml_new(YAML_MAP, NULL, NULL, COMMAND_LINE, 0);
    for (int i = 0; i < count; i++)
        yaml_override(all, argument[i]);
    config_check_names(root);
    config_check_names(all);
    yaml_free(all);
    config_rename(root);
    for (int i = 0; i < count; i++) {
        yaml_override(root, argument[i]);
        config_rename(root);
    }
}

Config *config_load(int argc, char **argv, int world, char *(*latest)(const char *save_folder))
{
    if (argc < 2) {
        if (comm_rank() == 0)
            config_print_usage(stderr);
        return NULL;
    }
    for (int i = 1; i < argc; i++)
        if (is_question(argv[i]))
            return answer(argv[i]);
    watchdog_mark("reading the configuration", -1);
    const bool has_file = argv[1][0] != '-';
    Settings *s = xcalloc(1, sizeof *s);
    Reader r = { .s = s,
                 .root = has_file ? yaml_load(argv[1]) : config_without_file(),
                 .file = has_file ? argv[1] : COMMAND_LINE,
                 .world = world };
    r.notes = xtext(&r.notes_text);
    const bool has_model =
        yaml_find(r.root, "model.d_model") || yaml_find(r.root, "model.n_layers");
    read_arguments(r.root, argc - (has_file ? 2 : 1), argv + (has_file ? 2 : 1));
    if (!has_file)
        config_check_command_line(&r, argv[1]);

    config_defaults(s, "");
    read_keys(&r, true);
    find_load_folder(&r, latest);
    config_find_base(&r);
    if (!has_file)
        config_choose_adapter_rate(&r);
    const bool from_hf = !has_model && read_hf(&r);
    read_keys(&r, false);
    check_complete(&r, from_hf);
    config_choose_ranks(&r);
    config_complete_model(&r, from_hf);
    config_check_optimizer(&r);
    config_complete_recipe(&r);
    config_complete_lora(&r);
    config_check_images(&r);
    config_complete_data(&r);
    config_check_image_data(&r);
    config_complete_run(&r);
    read_evaluators(&r);
    config_check_trainable(&r);
    fclose(r.notes);
    if (r.num_notes)
        warn("%s: without effect here: %s", r.file, r.notes_text);
    free(r.notes_text);
    s->c.changes = config_changes(&r, from_hf);
    yaml_free(r.root);
    config_write_text(s);
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
    config_free_element(s, "");
    config_free_mix(c);
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
