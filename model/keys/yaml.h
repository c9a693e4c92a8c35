/* A YAML file as a tree of values with file and line, merged with settings of the command line.
 * Independent of the table of keys. */
#pragma once

typedef enum { YAML_SCALAR, YAML_LIST, YAML_MAP } YamlKind;

typedef struct YamlNode YamlNode;
struct YamlNode {
    YamlKind kind;
    char *key;  /* name in the enclosing map; NULL for elements of lists and at the root */
    char *text; /* text of a scalar; NULL: null */
    /* the file that contains the value; if line is 0, the command-line argument itself */
    char *file;
    int line;
    YamlNode **child; /* children of a list or map, in order; owned */
    int num_children;
};

/* Reads a file. Dies with file:line on a syntax error or a key given twice. */
YamlNode *yaml_load(const char *path);

/* As yaml_load, for a text that messages call `name`; its values have line 0. */
YamlNode *yaml_parse(const char *text, const char *name);

/* Merges "--a.b=value" (or "--a.b": true) into the tree; a dash in the key means an underscore. A
 * value that starts with [ { " or ' is parsed as YAML; any other value is a text, and `null` is
 * null. */
void yaml_override(YamlNode *root, const char *argument);

/* Merges n, which has no key, into the tree under the name "a.b"; takes ownership of n. */
void yaml_put(YamlNode *root, const char *name, YamlNode *n);

/* name: "a.b"; NULL: the tree has no such node */
YamlNode *yaml_find(const YamlNode *root, const char *name);
/* the node at or below n with this text; NULL: there is none */
const YamlNode *yaml_find_text(const YamlNode *n, const char *text);
/* finds a node as yaml_find, and removes it from the tree; the caller owns it */
YamlNode *yaml_take(YamlNode *root, const char *name);
const char *yaml_where(const YamlNode *n); /* "x.yaml:12" or "--a=b"; one of 4 static buffers */
void yaml_free(YamlNode *n);

/* Functions to build trees: texts are copied; yaml_add takes ownership of the child. */
YamlNode *yaml_new(YamlKind kind, const char *key, const char *text, const char *file, int line);
YamlNode *yaml_copy(const YamlNode *n, const char *key);
void yaml_add(YamlNode *parent, YamlNode *child);

/* Replaces ~/ by $HOME/ at the start of texts at n and below: after --key= a shell does not. */
void yaml_expand_home(YamlNode *n);
