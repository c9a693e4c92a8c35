/* Two configurations as they were written out, key by key. */
#include "model/run/resume.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/error.h"
#include "model/checkpoint/folder.h"
#include "model/config/table.h"

/* Keys, or sections with a dot behind them. Of the model the weights say all but this; what else shapes do not show is compared
 * with config.json when they are loaded. Of adapters all but how their base is stored is the file's or refused. */
static const char *const compared[] = {
    "seed", "recipe", "format.", "trainable", "lora.base", "model.max_sequence_length", "model.eos_token_id", "model.pad_token_id",
    "data.", "global_train_batch_size", "device_train_microbatch_size", "max_duration", "optimizer.", "scheduler.",
    "max_grad_norm", "spikes", "softmax_auxiliary_loss", "auxiliary_loss_multiplier",
};

static bool is_compared(const ConfigKey *k)
{
    const int type = k->type & TYPE_MASK;
    if (type == FIXED || type == UNUSED || k->type & SPENT)
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

/* Of element i, where a value is a list of one. */
static const char *text_of(const YamlNode *n, int i)
{
    const YamlNode *e = n->kind == YAML_SCALAR ? n : i < n->num_children ? n->child[i] : NULL;
    return e && e->kind == YAML_SCALAR && e->text ? e->text : e && e->kind != YAML_SCALAR ? "..." : "null";
}

static bool is_column(const char *key)
{
    return strncmp(key, "format.", strlen("format.")) == 0;
}

/* Of lists the first element that differs. moved: nobody asked for it. */
static void print_change(const char *key, const YamlNode *now, const YamlNode *then, bool moved)
{
    const int n = elements(now), m = elements(then), most = n > m ? n : m;
    int i = 0;
    while (i < most && i < n && i < m && strcmp(text_of(now, i), text_of(then, i)) == 0)
        i++;
    if (i == most)
        return;
    if (now->kind != YAML_LIST && then->kind != YAML_LIST)
        printf("resume: %s %s, was %s", key, text_of(now, 0), text_of(then, 0));
    else
        printf("resume: %s[%d] %s of %d, was %s of %d", key, i, i < n ? text_of(now, i) : "none", n,
               i < m ? text_of(then, i) : "none", m);
    if (moved)
        printf(": --%s=%s goes on as before", key, text_of(then, 0));
    putchar('\n');
}

/* As it would have been written out. */
static YamlNode *default_of(const ConfigKey *k)
{
    char *text;
    size_t size;
    Settings *s = xcalloc(1, sizeof *s);
    FILE *f = open_memstream(&text, &size);
    if (!f)
        die("out of host memory");
    value_default(s, k);
    value_print(f, s, k, 0);
    fclose(f);
    YamlNode *n = yaml_parse(text, k->name);
    value_free(s, k);
    free(s);
    free(text);
    return n;
}

/* A configuration with the columns that follow from its recipe as what they were in that program, which its text says behind them:
 * "  scales: null    # step". */
static YamlNode *with_columns(FILE *f, const char *name)
{
    static const char follows[] = "null    # ";
    char *line = NULL, *text;
    size_t room = 0, size;
    bool columns = false;
    FILE *out = open_memstream(&text, &size);
    if (!f || !out)
        die("%s: cannot read this configuration: %m", name);
    while (getline(&line, &room, f) > 0) {
        columns = line[0] == ' ' ? columns : strcmp(line, "format:\n") == 0;
        char *null = columns ? strstr(line, follows) : NULL;
        if (null)
            memmove(null, null + strlen(follows), strlen(null + strlen(follows)) + 1);
        fputs(line, out);
    }
    fclose(f);
    fclose(out);
    YamlNode *n = yaml_parse(text, name);
    free(line);
    free(text);
    return n;
}

/* What a program did that did not have the key, as it would have been written out; NULL: as this one does. */
static YamlNode *before_key(const ConfigKey *k, const YamlNode *then)
{
    if (!is_column(k->name))
        return k->fallback ? default_of(k) : NULL;
    const YamlNode *stream = yaml_find(then, "format.stream");
    const char *text = strcmp(k->name, "format.scales") == 0 ? "microbatch"
                     : strcmp(k->name, "format.head") == 0 && stream ? text_of(stream, 0) : NULL;
    return text ? yaml_new(YAML_SCALAR, k->name, text, "model/run/resume.c", 0) : NULL;
}

/* given: the configuration as it is written; now: with columns, like `then`, if both have the same recipe. */
static void compare(const YamlNode *given, const YamlNode *now, const YamlNode *then, bool same_recipe)
{
    for (const ConfigKey *k = config_keys; k->name; k++) {
        const YamlNode *a = is_compared(k) ? yaml_find(now, k->name) : NULL, *b = a ? yaml_find(then, k->name) : NULL;
        YamlNode *usual = a && !b ? before_key(k, then) : NULL;
        const bool moved = a && same_recipe && is_column(k->name) && !yaml_find(given, k->name)->text;
        if (a && (b || usual))
            print_change(k->name, a, b ? b : usual, moved);
        yaml_free(usual);
    }
}

void resume_print(const Config *c, const char *folder)
{
    char *path = xasprintf("%s/config.yaml", folder);
    if (folder_exists(path)) {
        YamlNode *then = yaml_load(path), *given = yaml_parse(c->text, "the configuration");
        YamlNode *old_columns = with_columns(fopen(path, "r"), path);
        YamlNode *columns = with_columns(fmemopen(c->text, strlen(c->text), "r"), "the configuration");
        const YamlNode *recipe = yaml_find(given, "recipe"), *other = yaml_find(then, "recipe");
        const bool same = other && strcmp(text_of(recipe, 0), text_of(other, 0)) == 0;
        compare(given, same ? columns : given, same ? old_columns : then, same);
        yaml_free(old_columns);
        yaml_free(columns);
        yaml_free(then);
        yaml_free(given);
    }
    free(path);
}
