/* A YAML file as a tree of values with their places (file:line), merged with command-line
 * overrides. Independent of the table of keys. */
#pragma once

typedef enum { YAML_SCALAR, YAML_LIST, YAML_MAP } YamlKind;

typedef struct YamlNode YamlNode;
struct YamlNode {
    YamlKind kind;
    char *key;  /* name in the enclosing map; NULL in lists and at the root */
    char *text; /* text of a scalar; NULL: null */
    /* the file that has the value; with line 0, the command-line argument itself */
    char *file;
    int line;
    YamlNode **child; /* children of a list or map, in order; owned */
    int num_children;
};

/* Reads a file. Dies with file:line on a syntax error or a key given twice. */
YamlNode *yaml_load(const char *path);

/* The same for a text, called `name` in messages; its values have line 0. */
YamlNode *yaml_parse(const char *text, const char *name);

/* Merges "--a.b=value" (or "--a.b": true) into the tree; a dash in the key means an underscore. A
 * value that starts with [ { " or ' is parsed as YAML; any other is a text, or null for `null`. */
void yaml_override(YamlNode *root, const char *argument);

/* Merges n, which has no key, into the tree as "a.b"; takes ownership. */
void yaml_put(YamlNode *root, const char *name, YamlNode *n);

YamlNode *yaml_find(const YamlNode *root, const char *name); /* "a.b"; NULL: not there */
/* the node at or below n with this text, or NULL */
const YamlNode *yaml_find_text(const YamlNode *n, const char *text);
/* yaml_find, and the node is removed from the tree; the caller owns it */
YamlNode *yaml_take(YamlNode *root, const char *name);
const char *yaml_where(const YamlNode *n); /* "x.yaml:12" or "--a=b"; one of 4 static buffers */
void yaml_free(YamlNode *n);

/* To build trees: texts are copied, yaml_add takes ownership of the child. */
YamlNode *yaml_new(YamlKind kind, const char *key, const char *text, const char *file, int line);
YamlNode *yaml_copy(const YamlNode *n, const char *key);
void yaml_add(YamlNode *parent, YamlNode *child);

/* Replaces ~/ at the start of texts at n and below by $HOME/: a shell does not after --key=. */
void yaml_expand_home(YamlNode *n);
