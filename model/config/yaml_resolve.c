/* The interpolations of OmegaConf that OLMo's and COAT's files use, innermost first: the text
 * inside ${...} is expanded, then looked up or passed to the resolver that it names. They are
 * evaluated when a value is used: ${run_name} includes overrides, and an environment variable of an
 * unused key may be missing. */
#include "data/pattern.h"
#include "kernels/runtime/error.h"
#include "model/config/files.h"
#include "model/config/yaml.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARGUMENTS = 16, MAX_DEPTH = 16 };

typedef struct {
    const YamlNode *root;
    /* the value being resolved, and the place of its result in messages */
    const YamlNode *at;
    YamlDefault *default_of;
    YamlName *name_of;
    int depth; /* of references to references */
} Scope;

static YamlNode *expand(Scope *s, const char *text);

static YamlNode *scalar(const Scope *s, const char *text)
{
    return yaml_new(YAML_SCALAR, NULL, text, s->at->file, s->at->line);
}

static int exists(const char *path)
{
    return strstr(path, "://") || access(path, F_OK) == 0;
}

/* A copy with ~/ replaced by $HOME/: a shell does not expand it after --key=. */
static char *expand_home(const YamlNode *at, const char *text)
{
    const bool at_home = strncmp(text, "~/", 2) == 0;
    const char *home = at_home ? getenv("HOME") : "";
    if (!home)
        die("%s: '%s': the environment variable HOME is not set; write the whole path",
            yaml_where(at), text);
    return xasprintf("%s%s", home, text + at_home);
}

/* ---- resolvers: arguments in, value out ------------------------------------------------------ */

static YamlNode *from_environment(const Scope *s, char **arg, int count)
{
    const char *value = getenv(arg[0]);
    if (!value && count < 2)
        die("%s: the environment variable %s is not set; set it or write ${oc.env:%s,default}",
            yaml_where(s->at), arg[0], arg[0]);
    if (!value && strcmp(arg[1], "null") == 0)
        return scalar(s, NULL);
    return scalar(s, value ? value : arg[1]);
}

/* As in OLMo, missing paths are not created. */
static YamlNode *choose_path(const Scope *s, char **arg, int count)
{
    char list[2048] = "";
    for (int i = 0; i < count; i++) {
        if (exists(arg[i]))
            return scalar(s, arg[i]);
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s'%s'", i ? ", " : "", arg[i]);
    }
    die("%s: ${path.choose:...}: none of %s exists; create one of them, or write a path without "
        "path.choose",
        yaml_where(s->at), list);
}

static YamlNode *glob_paths(const Scope *s, char **arg, int count)
{
    YamlNode *list = yaml_new(YAML_LIST, NULL, NULL, s->at->file, s->at->line);
    for (int i = 0; i < count; i++) {
        int error;
        Matches found = pattern_match(arg[i], &error);
        if (error)
            die("%s: cannot list the files of '%s': %s", yaml_where(s->at), arg[i],
                strerror(error));
        if (found.count == 0)
            die("%s: no file matches '%s'", yaml_where(s->at), arg[i]);
        for (int k = 0; k < found.count; k++)
            yaml_add(list, scalar(s, found.path[k]));
        pattern_free(&found);
    }
    return list;
}

static YamlNode *last_checkpoint(const Scope *s, char **arg, int count)
{
    long *steps;
    const int n = file_steps(&steps, arg[0], "");
    (void)count;
    if (n == 0)
        die("%s: there is no checkpoint stepN in '%s'", yaml_where(s->at), arg[0]);
    char *path = xasprintf("%s/step%ld", arg[0], steps[n - 1]);
    YamlNode *out = scalar(s, path);
    free(path);
    free(steps);
    return out;
}

static YamlNode *check_exist(const Scope *s, char **arg, int count)
{
    (void)count;
    return scalar(s, exists(arg[0]) ? arg[0] : NULL);
}

static const struct {
    const char *name;
    YamlNode *(*evaluate)(const Scope *s, char **arg, int count);
} resolvers[] = {
    { "oc.env", from_environment },      { "path.choose", choose_path },
    { "path.glob", glob_paths },         { "path.last_checkpoint", last_checkpoint },
    { "path.check_exist", check_exist },
};

/* ---- evaluation ------------------------------------------------------------------------------ */

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    for (size_t n = strlen(text); n && isspace((unsigned char)text[n - 1]); n--)
        text[n - 1] = '\0';
    return text;
}

/* The value of another key. */
static YamlNode *reference(Scope *s, const char *name)
{
    const char *own = s->name_of(name);
    const YamlNode *target = yaml_find(s->root, own);
    const char *default_text = target ? NULL : s->default_of(own);
    if (!target && !default_text)
        die("%s: ${%s}: there is no key '%s'", yaml_where(s->at), name, name);
    if (s->depth == MAX_DEPTH)
        die("%s: ${%s} refers to itself", yaml_where(s->at), name);
    s->depth++;
    YamlNode *out;
    if (!target)
        out = scalar(s, strcmp(default_text, "null") == 0 ? NULL : default_text);
    else if (target->kind == YAML_SCALAR && target->text)
        out = expand(s, target->text);
    else
        out = yaml_copy(target, NULL);
    s->depth--;
    return out;
}

/* The value of ${inner}; destroys `inner`. */
static YamlNode *evaluate(Scope *s, char *inner)
{
    char *arg[MAX_ARGUMENTS], *list = strchr(inner, ':');
    int count = 0;
    if (!list)
        return reference(s, trim(inner));
    *list++ = '\0';
    while (list && count < MAX_ARGUMENTS) {
        char *comma = strchr(list, ',');
        if (comma)
            *comma++ = '\0';
        arg[count++] = expand_home(s->at, trim(list));
        list = comma;
    }
    YamlNode *out = NULL;
    for (size_t i = 0; i < sizeof resolvers / sizeof *resolvers; i++)
        if (strcmp(resolvers[i].name, trim(inner)) == 0)
            out = resolvers[i].evaluate(s, arg, count);
    if (!out)
        die("%s: ${%s:...} is unknown; there are oc.env, path.choose, path.glob, "
            "path.last_checkpoint, path.check_exist",
            yaml_where(s->at), inner);
    while (count > 0)
        free(arg[--count]);
    return out;
}

/* The } that belongs to the ${ at `open`. */
static const char *closing_brace(const Scope *s, const char *open)
{
    int depth = 0;
    for (const char *c = open; *c; c++) {
        if (c[0] == '$' && c[1] == '{')
            depth++;
        else if (*c == '}' && --depth == 0)
            return c;
    }
    die("%s: '%s' lacks a closing }", yaml_where(s->at), open);
}

/* Expands a part of a longer text, or the text inside ${...}, to text. */
static char *expand_text(Scope *s, const char *text, size_t length)
{
    char *part = xcalloc(length + 1, 1);
    memcpy(part, text, length);
    YamlNode *n = expand(s, part);
    if (n->kind != YAML_SCALAR)
        die("%s: '%s' is a list or a section where a text is needed", yaml_where(s->at), part);
    free(part);
    char *out = n->text ? n->text : strcpy(xmalloc(5), "null");
    n->text = NULL;
    yaml_free(n);
    return out;
}

static YamlNode *expand(Scope *s, const char *text)
{
    const char *open = strstr(text, "${");
    if (!open)
        return scalar(s, text);
    const char *close = closing_brace(s, open);
    char *inner = expand_text(s, open + 2, close - open - 2);
    YamlNode *value = evaluate(s, inner);
    free(inner);
    if (open == text && !close[1])
        return value;
    if (value->kind != YAML_SCALAR)
        die("%s: '%s' puts a list or a section inside a text", yaml_where(s->at), text);
    char *rest = expand_text(s, close + 1, strlen(close + 1));
    char *whole =
        xasprintf("%.*s%s%s", (int)(open - text), text, value->text ? value->text : "null", rest);
    YamlNode *out = scalar(s, whole);
    free(whole);
    free(rest);
    yaml_free(value);
    return out;
}

void yaml_resolve(const YamlNode *root, YamlNode *n, YamlDefault *default_of, YamlName *name_of)
{
    for (int i = 0; i < n->num_children; i++)
        yaml_resolve(root, n->child[i], default_of, name_of);
    if (n->kind != YAML_SCALAR || !n->text)
        return;
    Scope s = { .root = root, .at = n, .default_of = default_of, .name_of = name_of };
    YamlNode *value = expand(&s, n->text);
    free(n->text);
    n->text = value->text ? expand_home(n, value->text) : NULL;
    n->kind = value->kind;
    n->child = value->child;
    n->num_children = value->num_children;
    value->child = NULL;
    value->num_children = 0;
    yaml_free(value);
}
