/* Compares two written configurations key by key, and the columns of a recipe by value. */
#include "model/run/resume.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/names.h"
#include "model/config/resolved.h"
#include "model/formats/file.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value.h"
#include "model/keys/value_print.h"

/* Keys, or sections with a final dot. Only these keys of the model are compared: loading finds
 * changes of the other keys by the shapes of weights or by config.json. Of lora.*, only lora.base
 * is compared: the other keys come from the adapters' file. */
static const char *const compared[] = {
    "seed",
    "recipe",
    "format.",
    "activations.",
    "fp8.",
    "trainable",
    "lora.base",
    "model.max_sequence_length",
    "model.eos_token_id",
    "model.pad_token_id",
    "data.",
    "global_train_batch_size",
    "batch_size_warmup",
    "sequence_length_warmup.",
    "device_train_microbatch_size",
    "max_duration",
    "optimizer.",
    "scheduler.",
    "max_grad_norm",
    "average.",
    "spikes",
    "softmax_auxiliary_loss",
    "loss_temperature",
    "preference.",
    "auxiliary_loss_multiplier",
};

static bool is_compared(const ConfigKey *k)
{
    const int type = k->type & TYPE_MASK;
    if (type == FIXED || type == SECTIONS || key_element_prefix(k->name) || k->type & SPENT)
        return false;
    for (size_t i = 0; i < sizeof compared / sizeof compared[0]; i++) {
        const size_t n = strlen(compared[i]);
        if (strncmp(k->name, compared[i], n) == 0 && (compared[i][n - 1] == '.' || !k->name[n]))
            return true;
    }
    return false;
}

static int elements(const YamlNode *n)
{
    return n->kind == YAML_LIST ? n->num_children : 1;
}

/* The text of element i. A single value counts as a list with one element. */
static const char *text_of(const YamlNode *n, int i)
{
    const YamlNode *e = n->kind == YAML_SCALAR ? n : i < n->num_children ? n->child[i] : NULL;
    return e && e->kind == YAML_SCALAR && e->text ? e->text
           : e && e->kind != YAML_SCALAR          ? "..."
                                                  : "null";
}

/* Prints a change. For lists, prints the first element that differs. */
static void print_change(const char *key, const YamlNode *now, const YamlNode *then)
{
    const int n = elements(now), m = elements(then), most = n > m ? n : m;
    int i = 0;
    while (i < most && i < n && i < m && strcmp(text_of(now, i), text_of(then, i)) == 0)
        i++;
    if (i == most)
        return;
    if (now->kind != YAML_LIST && then->kind != YAML_LIST)
        printf("resume: %s %s, was %s\n", key, text_of(now, 0), text_of(then, 0));
    else if (n == m)
        printf("resume: %s[%d] %s, was %s\n", key, i, text_of(now, i), text_of(then, i));
    else
        printf("resume: %s[%d] %s, was %s; %d in all, were %d\n", key, i,
               i < n ? text_of(now, i) : "none", i < m ? text_of(then, i) : "none", n, m);
}

/* The default as a written configuration shows it. */
static YamlNode *default_of(const ConfigKey *k)
{
    Settings *s = xcalloc(1, sizeof *s);
    value_default(s, k);
    char *text = value_printed(s, k);
    YamlNode *n = yaml_parse(text, k->name);
    value_free(s, k);
    free(s);
    free(text);
    return n;
}

/* Compares a column of the same recipe by its value: the recipe's row may have changed since the
 * checkpoint was saved. columns: the columns of the earlier run; missing columns are not compared.
 * asked: the user gives this column now. */
static void compare_column(const ConfigKey *k, const Config *c, const json_t *columns, bool asked)
{
    const char *was = resolved_column_in(columns, k);
    char *is = value_printed(c, k);
    if (was && strcmp(is, was) != 0 && asked)
        printf("resume: %s %s, was %s\n", k->name, is, was);
    else if (was && strcmp(is, was) != 0)
        printf("resume: %s %s, was %s: --%s=%s continues as before\n", k->name, is, was, k->name,
               was);
    free(is);
}

static void compare(const Config *c, const YamlNode *now, const YamlNode *then,
                    const json_t *columns)
{
    const YamlNode *recipe = yaml_find(then, "recipe");
    const bool same = recipe && strcmp(text_of(recipe, 0), c->recipe.name) == 0;
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const YamlNode *a = is_compared(k) ? yaml_find(now, k->name) : NULL,
                       *b = yaml_find(then, k->name);
        /* the earlier run's version had no such key */
        YamlNode *usual = a && !b && k->default_text ? default_of(k) : NULL;
        if (a && same && key_column(k))
            compare_column(k, c, columns, a->text);
        else if (a && (b || usual))
            print_change(k->name, a, b ? b : usual);
        yaml_free(usual);
    }
}

void resume_print(const Config *c, const char *folder)
{
    char *path = xasprintf("%s/config.yaml", folder);
    if (file_exists(path)) {
        YamlNode *then = yaml_load(path), *now = yaml_parse(c->text, "the configuration");
        names_rename(then);
        json_t *state = file_try_json(folder, "trainer.json");
        compare(c, now, then, json_object_get(state, "format"));
        json_decref(state);
        yaml_free(then);
        yaml_free(now);
    }
    free(path);
}
