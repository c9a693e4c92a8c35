/* Writes the resolved configuration as YAML, and the columns of its recipe as JSON. */
#include "model/config/resolved.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/data_mixture.h"
#include "model/config/names.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value_print.h"

json_t *resolved_columns(const Config *c)
{
    json_t *columns = json_object();
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const char *column = key_column(k);
        if (!column)
            continue;
        char *text = value_printed(c, k);
        json_object_set_new(columns, column, json_string(text));
        free(text);
    }
    return columns;
}

/* Earlier versions wrote the keys of names.c as format.NAME. */
const char *resolved_column_in(const json_t *columns, const ConfigKey *k)
{
    static const char section[] = "format.";
    const char *other = names_other(k->name),
               *text = json_string_value(json_object_get(columns, key_column(k)));
    return text || !other ? text
                          : json_string_value(json_object_get(columns, other + strlen(section)));
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Prints the headings of the sections that `name` is in and `previous` is not, then the last
 * component of `name`. Returns the indentation. */
static int print_key(FILE *f, const char *name, const char *previous)
{
    size_t same = 0;
    for (size_t i = 0; previous[i] && previous[i] == name[i]; i++)
        if (name[i] == '.')
            same = i + 1;
    int indent = 0;
    for (const char *component = name;; indent += 2) {
        size_t length = strcspn(component, ".");
        bool last = component[length] != '.';
        if (last || (size_t)(component - name) >= same)
            fprintf(f, "%*s%.*s:%s", indent, "", (int)length, component, last ? "" : "\n");
        if (last)
            return indent;
        component += length + 1;
    }
}

static void print_eval_paths(FILE *f, const char *key, char *const *paths, int count)
{
    if (count > 0)
        fprintf(f, "    %s:\n", key);
    for (int i = 0; i < count; i++) {
        fputs("    - ", f);
        value_print_text(f, paths[i]);
        fputc('\n', f);
    }
}

static void print_eval_set(FILE *f, const EvalSet *e)
{
    fputs("- label: ", f);
    value_print_text(f, e->label);
    if (e->downstream)
        fputs("\n  type: downstream\n  data:\n", f);
    else
        fprintf(f,
                "%s\n  data:\n    memmap_dtype: %s\n    packing: %s\n    document_boundaries: %s\n",
                e->pairs ? "\n  type: preference" : "",
                e->files.itemsize == UINT16 ? "uint16" : "uint32",
                e->files.packing == PACK_CONCAT ? "concat" : "best_fit",
                e->files.boundaries == BOUNDARIES_EOS ? "eos" : "metadata");
    print_eval_paths(f, "paths", e->files.paths, e->files.num_paths);
    print_eval_paths(f, "label_mask_paths", e->files.label_mask_paths,
                     e->files.num_label_mask_paths);
    print_eval_paths(f, "image_paths", e->files.image_paths, e->files.num_image_paths);
    if (e->files.image_features) {
        fputs("    image_features: ", f);
        value_print_text(f, e->files.image_features);
        fputc('\n', f);
    }
}

Settings resolved_followed(const Settings *s)
{
    Settings follows = *s;
    follows.c.recipe = *recipe_find(s->recipe);
    follows.c.data.seed = s->c.seed;
    follows.c.model.lora.base_path = s->c.model.lora.rank > 0 ? s->c.load_path : NULL;
    return follows;
}

/* Prints a value. A value that follows from another key is printed as null, with the value as a
 * comment: with another --recipe, the file then has that recipe's columns. follows: s with these
 * values filled in. */
static void print_value(FILE *f, const Settings *s, const Settings *follows, const ConfigKey *k,
                        int indent)
{
    if (!(k->type & FOLLOWS)) {
        value_print(f, s, k, indent);
        return;
    }
    char *own = value_printed(s, k), *other = value_printed(follows, k);
    fprintf(f, strcmp(own, other) == 0 ? " null    # %s\n" : " %s\n", own);
    free(own);
    free(other);
}

void resolved_write(Settings *s)
{
    const char *previous = "";
    const Settings follows = resolved_followed(s);
    FILE *f = xtext(&s->c.text);
    fputs(
        "# All settings of a run, defaults included. ./train with this file does the same again.\n",
        f);
    for (const ConfigKey *k = config_keys; k->name; k++) {
        int type = k->type & TYPE_MASK;
        if (type == FIXED || (k->type & SPENT) || key_element_prefix(k->name))
            continue;
        int indent = print_key(f, k->name, previous);
        if (type == SECTIONS)
            data_mixture_print(f, &s->c);
        else
            print_value(f, s, &follows, k, indent);
        previous = k->name;
    }
    fputs(s->c.num_eval ? "evaluators:\n" : "evaluators: []\n", f);
    for (int i = 0; i < s->c.num_eval; i++)
        print_eval_set(f, &s->c.eval[i]);
    fclose(f);
}
