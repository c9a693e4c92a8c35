/* Converts libfyaml's document to our own tree, which has only what a configuration needs: scalars,
 * lists, maps and line numbers. With trees, an override is a merge, and errors can name the file
 * and line of any value. libfyaml resolves anchors and merge keys. Scalars stay text: value.c,
 * which knows the type, interprets 1e-5 or 739_328. */
#include "model/keys/yaml.h"

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"

#include <errno.h>
#include <jansson.h>
#include <libfyaml.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

YamlNode *yaml_new(YamlKind kind, const char *key, const char *text, const char *file, int line)
{
    YamlNode *n = xcalloc(1, sizeof *n);
    *n = (YamlNode){ .kind = kind,
                     .key = xstrdup(key),
                     .text = xstrdup(text),
                     .file = xstrdup(file),
                     .line = line };
    return n;
}

void yaml_add(YamlNode *parent, YamlNode *child)
{
    parent->child = xrealloc(parent->child, (parent->num_children + 1) * sizeof *parent->child);
    parent->child[parent->num_children++] = child;
}

YamlNode *yaml_copy(const YamlNode *n, const char *key)
{
    YamlNode *copy = yaml_new(n->kind, key, n->text, n->file, n->line);
    for (int i = 0; i < n->num_children; i++)
        yaml_add(copy, yaml_copy(n->child[i], n->child[i]->key));
    return copy;
}

static void free_content(YamlNode *n)
{
    for (int i = 0; i < n->num_children; i++)
        yaml_free(n->child[i]);
    free(n->child);
    free(n->text);
    free(n->file);
}

void yaml_free(YamlNode *n)
{
    if (!n)
        return;
    free_content(n);
    free(n->key);
    free(n);
}

static YamlNode *find_child(const YamlNode *n, const char *key, size_t length)
{
    for (int i = 0; n->kind == YAML_MAP && i < n->num_children; i++)
        if (strlen(n->child[i]->key) == length && strncmp(n->child[i]->key, key, length) == 0)
            return n->child[i];
    return NULL;
}

YamlNode *yaml_find(const YamlNode *root, const char *name)
{
    for (;;) {
        size_t length = strcspn(name, ".");
        YamlNode *n = find_child(root, name, length);
        if (!n || !name[length])
            return n;
        root = n;
        name += length + 1;
    }
}

const YamlNode *yaml_find_text(const YamlNode *n, const char *text)
{
    if (n && n->text && strcmp(n->text, text) == 0)
        return n;
    for (int i = 0; n && i < n->num_children; i++) {
        const YamlNode *found = yaml_find_text(n->child[i], text);
        if (found)
            return found;
    }
    return NULL;
}

YamlNode *yaml_take(YamlNode *root, const char *name)
{
    const char *dot = strrchr(name, '.');
    char *above = dot ? xasprintf("%.*s", (int)(dot - name), name) : NULL;
    YamlNode *parent = above ? yaml_find(root, above) : root,
             *n = parent ? yaml_find(parent, dot ? dot + 1 : name) : NULL;
    free(above);
    if (!n)
        return NULL;
    int i = 0;
    while (parent->child[i] != n)
        i++;
    parent->num_children--;
    memmove(&parent->child[i], &parent->child[i + 1],
            (size_t)(parent->num_children - i) * sizeof *parent->child);
    free(n->key);
    n->key = NULL;
    return n;
}

const char *yaml_where(const YamlNode *n)
{
    static char text[4][512];
    static int next;
    char *out = text[next++ % 4];
    snprintf(out, sizeof text[0], n->line ? "%s:%d" : "%s", n->file, n->line);
    return out;
}

void yaml_expand_home(YamlNode *n)
{
    for (int i = 0; i < n->num_children; i++)
        yaml_expand_home(n->child[i]);
    if (!n->text || strncmp(n->text, "~/", 2) != 0)
        return;
    const char *home = getenv("HOME");
    if (!home)
        die("%s: '%s': the environment variable HOME is not set; write the whole path",
            yaml_where(n), n->text);
    char *text = xasprintf("%s%s", home, n->text + 1);
    free(n->text);
    n->text = text;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Whether the text means null, in the spellings of YAML 1.1. */
static bool means_null(const char *text)
{
    return text_is_among(text, "|~|null|Null|NULL");
}

static int line_of(struct fy_node *n, int otherwise)
{
    struct fy_token *token = n && fy_node_is_scalar(n) ? fy_node_get_scalar_token(n) : NULL;
    const struct fy_mark *mark = token ? fy_token_start_mark(token) : NULL;
    return mark ? mark->line + 1 : otherwise;
}

/* Returns the text of a scalar, which must not contain a zero byte; NULL: no text. */
static const char *text_of(struct fy_node *n, const char *file, int line)
{
    size_t length = 0;
    const char *text = n ? fy_node_get_scalar(n, &length) : NULL;
    if (text && memchr(text, '\0', length))
        die(line ? "%s:%d: a text has a zero byte" : "%s: a text has a zero byte", file, line);
    return n ? fy_node_get_scalar0(n) : NULL;
}

/* line: the line of the key; for an item of a list, the line of its scalar or of the list. */
static YamlNode *convert(struct fy_node *n, const char *key, const char *file, int line)
{
    void *position = NULL;
    if (!n || fy_node_is_scalar(n)) {
        const char *text = text_of(n, file, line);
        bool plain = n && fy_node_get_style(n) == FYNS_PLAIN;
        return yaml_new(YAML_SCALAR, key, !text || (plain && means_null(text)) ? NULL : text, file,
                        line);
    }
    if (fy_node_is_sequence(n)) {
        YamlNode *list = yaml_new(YAML_LIST, key, NULL, file, line);
        for (struct fy_node *item; (item = fy_node_sequence_iterate(n, &position));)
            yaml_add(list, convert(item, NULL, file, line_of(item, line)));
        return list;
    }
    YamlNode *map = yaml_new(YAML_MAP, key, NULL, file, line);
    for (struct fy_node_pair *pair; (pair = fy_node_mapping_iterate(n, &position));) {
        struct fy_node *name = fy_node_pair_key(pair);
        int at = line_of(name, line);
        const char *word = name && fy_node_is_scalar(name) ? text_of(name, file, at) : NULL;
        if (!word)
            die("%s:%d: expected a word as key, found a list or a section", file, line);
        if (map->num_children == 0 && !key)
            map->line = at;
        yaml_add(map, convert(fy_node_pair_value(pair), word, file, at));
    }
    return map;
}

/* Reads `path`, or `text` if it is not NULL. Errors have `name` and libfyaml's text. */
static YamlNode *parse(const char *path, const char *text, const char *name)
{
    char *message;
    FILE *log = xtext(&message);
    struct fy_diag_cfg how;
    fy_diag_cfg_default(&how);
    how.fp = log;
    how.colorize = how.show_source = how.show_position = how.show_type = how.show_module = false;
    struct fy_diag *diag = fy_diag_create(&how);
    struct fy_parse_cfg cfg = { .search_path = "", .flags = FYPCF_RESOLVE_DOCUMENT, .diag = diag };
    struct fy_parser *parser = fy_parser_create(&cfg);
    if (text ? fy_parser_set_string(parser, text, FY_NT) : fy_parser_set_input_file(parser, path))
        die("%s: cannot be read", name);
    struct fy_document *document = fy_parse_load_document(parser);
    struct fy_document *second = document ? fy_parse_load_document(parser) : NULL;
    fflush(log);
    message[strcspn(message, "\n")] = '\0';
    /* a message is "file:line:column: error: duplicate key" */
    char *words = strstr(message, "error: ");
    if (words)
        die("%.*s: %s%s", text ? (int)strlen(name) : (int)(words - message) - 2,
            text ? name : message, words + strlen("error: "),
            strstr(words, "alias") ? "; quote a pattern that begins with *, as in '*.npy'" : "");
    if (!document)
        die("%s: is empty, or not YAML", name);
    if (second)
        die("%s: has several documents, expected one: remove the lines --- and the other documents",
            name);
    YamlNode *tree = convert(fy_document_root(document), NULL, name, text ? 0 : 1);
    fy_parse_document_destroy(parser, document);
    fy_parser_destroy(parser);
    fy_diag_destroy(diag);
    fclose(log);
    free(message);
    return tree;
}

/* Dies on a byte that is not UTF-8, or zero, in a comment or at the start of a value: libfyaml
 * would take such a byte as the end of the file. */
static void check_lines(FILE *file, const char *path)
{
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    for (int number = 1; (length = getline(&line, &size, file)) > 0; number++) {
        json_t *text = json_stringn(line, (size_t)length);
        if (!text || memchr(line, '\0', (size_t)length))
            die("%s:%d: this line is not UTF-8, or has a zero byte; save the file as UTF-8 (iconv "
                "-f latin1 -t utf-8 converts)",
                path, number);
        json_decref(text);
    }
    free(line);
}

YamlNode *yaml_load(const char *path)
{
    const char *end = strrchr(path, '.');
    if (end && strcmp(end, ".npy") == 0)
        die("%s is not a configuration file; tokens are given as --data.paths=%s", path, path);
    errno = 0;
    FILE *file = fopen(path, "rb");
    if (file)
        check_lines(file, path);
    if (!file || ferror(file)) /* fopen succeeds on a folder, but reading fails */
        die("%s: cannot read this configuration file: %m%s%s", path,
            errno == EISDIR ? "; a model's folder is given as --load_path=" : "",
            errno == EISDIR ? path : "");
    fclose(file);
    YamlNode *root = parse(path, NULL, path);
    if (root->kind != YAML_MAP)
        die("%s: a configuration is a list of `key: value` lines", path);
    return root;
}

YamlNode *yaml_parse(const char *text, const char *name)
{
    return parse(NULL, text, name);
}

/* ---- overrides ------------------------------------------------------------------------------- */

/* Merges `from` into `to`, key by key if both are maps; otherwise `from` replaces `to`. Takes
 * ownership of `from`. */
static void merge(YamlNode *to, YamlNode *from)
{
    if (to->kind == YAML_MAP && from->kind == YAML_MAP) {
        for (int i = 0; i < from->num_children; i++) {
            YamlNode *child = from->child[i], *old = find_child(to, child->key, strlen(child->key));
            if (old)
                merge(old, child);
            else
                yaml_add(to, child);
        }
        from->num_children = 0;
    } else {
        char *key = to->key;
        free_content(to);
        *to = *from;
        to->key = key;
        from->child = NULL;
        from->num_children = 0;
        from->text = from->file = NULL;
    }
    yaml_free(from);
}

static void set_places(YamlNode *n, const char *file)
{
    free(n->file);
    n->file = xstrdup(file);
    n->line = 0;
    for (int i = 0; i < n->num_children; i++)
        set_places(n->child[i], file);
}

void yaml_put(YamlNode *root, const char *name, YamlNode *n)
{
    char *rest = xstrdup(name);
    for (char *dot = rest; dot;) { /* a.b: c means {a: {b: c}} */
        dot = strrchr(rest, '.');
        YamlNode *map = yaml_new(YAML_MAP, NULL, NULL, n->file, n->line);
        n->key = xstrdup(dot ? dot + 1 : rest);
        yaml_add(map, n);
        n = map;
        if (dot)
            *dot = '\0';
    }
    merge(root, n);
    free(rest);
}

void yaml_override(YamlNode *root, const char *argument)
{
    if (*argument != '-' && (text_ends_with(argument, ".yaml") || text_ends_with(argument, ".yml")))
        die("unexpected argument '%s'; the only configuration file is the first argument: ./train "
            "%s --key=value ...",
            argument, argument);
    if (strncmp(argument, "--", 2) != 0 || !argument[2] || argument[2] == '=')
        die("unexpected argument '%s'; settings are changed by --key=value, as in "
            "--max_duration=100",
            argument);
    const char *equals = strchr(argument, '=');
    const char *value = equals ? equals + 1 : "true";
    if (!*value)
        die("%s: the value is empty (an unset shell variable?); %snull takes the default", argument,
            argument);
    char *name = xstrdup(argument + 2);
    name[strcspn(name, "=")] = '\0';
    for (char *c = name; *c; c++)
        if (*c == '-')
            *c = '_';

    YamlNode *n = *value && strchr("[{\"'", *value)
                      ? parse(NULL, value, argument)
                      : yaml_new(YAML_SCALAR, NULL, means_null(value) ? NULL : value, argument, 0);
    set_places(n, argument);
    yaml_put(root, name, n);
    free(name);
}
