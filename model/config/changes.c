/* A dry run prints only the settings that differ from the defaults. The folder of a run has all
 * settings. */
#include "model/config/changes.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/config/resolved.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value.h"
#include "model/keys/value_print.h"

enum { COLUMNS = 100 };

/* Wraps text at COLUMNS. */
typedef struct {
    FILE *f;
    int column;
} Lines;

static void add(Lines *l, const char *name, const char *value)
{
    const int n = (int)(strlen(name) + 1 + strlen(value));
    const bool fits = l->column > 0 && l->column + 2 + n <= COLUMNS;
    fprintf(l->f, "%s  %s=%s", fits || l->column == 0 ? "" : "\n", name, value);
    l->column = (fits ? l->column : 0) + 2 + n;
}

/* prints only the first path: there may be hundreds of shards */
static char *list_text(const char *field)
{
    char *const *text = *(char *const *const *)field;
    const int count = *(const int *)(field + sizeof(char **));
    if (count < 2)
        return xasprintf("[%s]", count ? text[0] : "");
    return xasprintf("[%s, ... %d in all]", text[0], count);
}

static char *value_of(const void *holder, const ConfigKey *k)
{
    if (value_is_list(k->type & TYPE_MASK))
        return list_text((const char *)holder + k->offset);
    return value_printed(holder, k);
}

/* Whether the value can differ from the default. A default of null means that the value follows
 * from other keys; then it differs only if it was given or loaded. */
static bool can_differ(const Reader *r, const ConfigKey *k, bool from_hf)
{
    const int type = k->type & TYPE_MASK;
    if (type == FIXED || type == DATASETS || type == SECTIONS || key_element_prefix(k->name))
        return false;
    const bool follows =
        !(k->type & FOLLOWS) && k->default_text && strcmp(k->default_text, "null") == 0;
    const bool loaded = (from_hf && strncmp(k->name, "model.", strlen("model.")) == 0) ||
                        strncmp(k->name, "lora.", strlen("lora.")) == 0;
    return !follows || loaded || reader_given(r, k->name);
}

static void add_evaluators(Lines *l, const Config *c)
{
    for (int i = 0; i < c->num_eval; i++)
        add(l, "evaluator", c->eval[i].label);
}

bool changes_is_default(const Reader *r, const ConfigKey *k)
{
    if (!k->default_text || strcmp(k->default_text, "null") == 0)
        return false;
    Settings *defaults = xcalloc(1, sizeof *defaults);
    value_default(defaults, k);
    char *own = value_of(r->s, k), *usual = value_of(defaults, k);
    const bool same = strcmp(own, usual) == 0;
    free(own);
    free(usual);
    value_free(defaults, k);
    free(defaults);
    return same;
}

char *changes_text(const Reader *r, bool from_hf)
{
    char *text;
    Settings *defaults = xcalloc(1, sizeof *defaults);
    const Settings follows = resolved_followed(r->s);
    Lines l = { .f = xtext(&text) };
    for (const ConfigKey *k = config_keys; k->name; k++) {
        if (!can_differ(r, k, from_hf))
            continue;
        if (k->default_text)
            value_default(defaults, k);
        char *own = value_of(r->s, k),
             *usual = value_of(k->type & FOLLOWS ? &follows : defaults, k);
        if (!k->default_text || strcmp(own, usual) != 0)
            add(&l, k->name, own);
        free(own);
        free(usual);
        value_free(defaults, k);
    }
    add_evaluators(&l, &r->s->c);
    fclose(l.f);
    free(defaults);
    return text;
}
