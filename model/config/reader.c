/* Reads the keys of a configuration into the objects of their table rows, and knows the file and
 * line of each value. Code that reads or checks several keys together uses these functions. */
#include "model/config/reader.h"

#include <jansson.h>
#include <stdarg.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/config/names.h"
#include "model/config/suggest.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value.h"

/* ---- asking ---------------------------------------------------------------------------------- */

bool reader_given(const Reader *r, const char *name)
{
    const YamlNode *n = yaml_find(r->root, name);
    return n && (n->kind != YAML_SCALAR || n->text);
}

const char *reader_where(const Reader *r, const char *name)
{
    const YamlNode *n = yaml_find(r->root, name);
    return n ? yaml_where(n) : r->file;
}

void reader_refuse(const Reader *r, const char *key, const char *value, const char *why)
{
    die("%s: %s %s %s", reader_where(r, key), key, value, why);
}

void reader_note(Reader *r, const char *format, ...)
{
    va_list args;
    fputs(r->num_notes++ ? ", " : "", r->notes);
    va_start(args, format);
    vfprintf(r->notes, format, args);
    va_end(args);
}

bool reader_is_unread(const Config *c, const char *name)
{
    return (c->dry_run || c->eval_only || c->generate) &&
           text_is_among(name, "data.paths|data.datasets|data.mix|data.label_mask_paths|"
                               "data.image_paths|data.image_features");
}

/* ---- reading --------------------------------------------------------------------------------- */

static void check_text(const YamlNode *n, const char *name, const char *text)
{
    json_t *json = json_string(text);
    if (!json)
        die("%s: %s: the value is not UTF-8, which YAML and JSON need; if it is a path, rename the "
            "file",
            yaml_where(n), name);
    json_decref(json);
    if (strstr(text, "${"))
        die("%s: %s: '%s': ${...} is not evaluated; write the value, or convert the file: python3 "
            "scripts/convert_config.py FILE "
            "> mine.yaml",
            yaml_where(n), name, text);
    if (strncmp(text, "~/", 2) == 0)
        die("%s: %s: '%s': ~/ is not possible here, because ~/ would be replaced when the run's "
            "config.yaml is read; write the whole path",
            yaml_where(n), name, text);
}

void reader_check_texts(const YamlNode *n, const char *name)
{
    if (n->text)
        check_text(n, name, n->text);
    for (int i = 0; i < n->num_children; i++) {
        if (n->child[i]->key)
            check_text(n->child[i], name, n->child[i]->key);
        reader_check_texts(n->child[i], name);
    }
}

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
    const char *now = names_replacement(name);
    if (now)
        die("%s: the key '%s' was removed; what replaces it: %s. For a file of OLMo or COAT: "
            "python3 scripts/convert_config.py FILE > mine.yaml",
            yaml_where(n), name, now);
    const char *own = names_current(name), /* the key may be in a section of earlier versions */
        *near = own != name ? own : suggest_key((const ConfigKey *const[]){ config_keys }, 1, name);
    if (near)
        die("%s: unknown key '%s'; did you mean '%s'?", yaml_where(n), name, near);
    die("%s: unknown key '%s'; ./train --help lists all. scripts/convert_config.py converts files "
        "of other programs",
        yaml_where(n), name);
}

/* Handles null for a section: --model.rope_scaling=null resets the values of a loaded model. A
 * top-level section does not change: `model: null` takes the whole model from load_path. */
static void forget_section(void *holder, const char *name)
{
    const size_t length = strlen(name);
    if (!strchr(name, '.'))
        return;
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (strncmp(k->name, name, length) == 0 && k->name[length] == '.')
            value_default(holder, k);
}

/* Dies at a dot between keys, or a [ before an element, in a file: both are only allowed on the
 * command line and in the table. */
void reader_check_key(const YamlNode *n)
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

void reader_apply(Reader *r, YamlNode *n, const char *name, void *holder)
{
    if (!is_section(name)) {
        const ConfigKey *k = key_find(name);
        /* OLMo's section `tokenizer` is not a key */
        if (!k || (n->kind == YAML_MAP && strcmp(name, "tokenizer") == 0))
            unknown(n, name);
        if (reader_is_unread(&r->s->c, name))
            return;
        if ((k->type & TYPE_MASK) == SECTIONS)
            return;
        yaml_expand_home(n);
        reader_check_texts(n, name);
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
        reader_check_key(n->child[i]);
        snprintf(child, sizeof child, "%s.%s", name, n->child[i]->key);
        reader_apply(r, n->child[i], child, holder);
    }
}

void reader_apply_element(Reader *r, YamlNode *n, const char *prefix, void *holder)
{
    reader_defaults(holder, prefix);
    for (int i = 0; i < n->num_children; i++) {
        char name[512];
        reader_check_key(n->child[i]);
        snprintf(name, sizeof name, "%s%s", prefix, n->child[i]->key);
        reader_apply(r, n->child[i], name, holder);
    }
}

static bool has_prefix(const char *name, const char *prefix)
{
    const size_t n = key_element_prefix(name);
    return n == strlen(prefix) && strncmp(name, prefix, n) == 0;
}

void reader_defaults(void *holder, const char *prefix)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (has_prefix(k->name, prefix))
            value_default(holder, k);
}

void reader_free_element(void *holder, const char *prefix)
{
    for (const ConfigKey *k = config_keys; k->name; k++)
        if (has_prefix(k->name, prefix))
            value_free(holder, k);
}
