/* The list `evaluators`, which defines the sets of Config.eval. */
#include "model/config/evaluators.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/check_data.h"
#include "model/config/check_images.h"

/* Adds a set with the paths (at least one) and label masks of the evaluator e, defined at `n`;
 * takes ownership of both. */
static void add_eval_set(Settings *s, const YamlNode *n, Evaluator *e, const char *label,
                         char ***paths, int *count)
{
    Config *c = &s->c;
    const char *at = yaml_where(yaml_find_text(n, (*paths)[0]));
    for (int i = 0; i < c->num_eval; i++)
        if (strcmp(c->eval[i].label, label) == 0)
            die("%s: two validation sets are named '%s', so their metrics would have the same "
                "name; rename one",
                at, label);
    c->eval = xrealloc(c->eval, (c->num_eval + 1) * sizeof *c->eval);
    char *where = xasprintf("%s: evaluator '%s' (--evaluators=[] trains without)", at, label);
    EvalSet *set = &c->eval[c->num_eval++];
    *set = (EvalSet){ .label = strdup(label),
                      .where = where,
                      .downstream = e->type == EVALUATOR_DOWNSTREAM,
                      .pairs = e->type == EVALUATOR_PREFERENCE,
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
    check_images_files(c, &set->files, set->where, "data", set->downstream);
    if (!set->downstream)
        check_data_eval_documents(c, set);
    if (set->pairs && c->preference.kind == PREFERENCE_NONE)
        die("%s: type preference needs a preference.loss", where);
    if (set->pairs &&
        (set->files.packing != PACK_BEST_FIT || set->files.boundaries != BOUNDARIES_METADATA))
        die("%s: type preference needs packing best_fit and document_boundaries metadata", where);
}

static bool any_remote(char *const *paths, int count)
{
    for (int i = 0; i < count; i++)
        if (strstr(paths[i], "://"))
            return true;
    return false;
}

/* Reads the sets of one evaluator: one per named dataset, or one with the evaluator's own label.
 * Remote paths are listed in `remote`. */
static void read_evaluator(Reader *r, YamlNode *n, FILE *downstream, FILE *remote)
{
    Evaluator e = { 0 };
    if (n->kind != YAML_MAP)
        die("%s: an evaluator is a section with label and data.paths or data.datasets",
            yaml_where(n));
    reader_apply_element(r, n, EVALUATOR_PREFIX, &e);
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
    reader_free_element(&e, EVALUATOR_PREFIX);
}

void evaluators_read(Reader *r)
{
    YamlNode *list = r->s->c.generate ? NULL : yaml_find(r->root, "evaluators");
    if (list && (list->kind == YAML_MAP || (list->kind == YAML_SCALAR && list->text)))
        die("%s: evaluators must be a list: `- label: name`, then indented `data:` with paths",
            yaml_where(list));
    char *text[2];
    FILE *downstream = xtext(&text[0]), *remote = xtext(&text[1]);
    for (int i = 0; list && i < list->num_children; i++)
        read_evaluator(r, list->child[i], downstream, remote);
    fclose(downstream);
    fclose(remote);
    if (*text[0])
        reader_note(r, "downstream evaluators without data.paths (%s)", text[0] + 1);
    if (*text[1])
        reader_note(r, "evaluators with remote data (%s)", text[1] + 1);
    free(text[0]);
    free(text[1]);
    if (r->s->c.eval_only && r->s->c.num_eval == 0 && !r->s->c.dry_run)
        die("%s: eval_only: there are no evaluators; scripts/prepare_eval.py makes a file with "
            "some",
            reader_where(r, list ? "evaluators" : "eval_only"));
}
