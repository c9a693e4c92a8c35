/* A YAML file as a tree of values with their places (file:line), merged with command-line
 * overrides. OmegaConf's ${...} is evaluated when a value is used. Independent of the table of
 * keys. */
#pragma once

typedef enum { YAML_SCALAR, YAML_LIST, YAML_MAP } YamlKind;

typedef struct YamlNode YamlNode;
struct YamlNode {
    YamlKind kind;
    char *key;  /* name in the enclosing map; NULL in lists and at the root */
    char *text; /* of a scalar; NULL: null */
    /* file of the value; if line is 0 the command-line argument itself */
    char *file;
    int line;
    YamlNode **child; /* of a list or map, in order; owned */
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
/* the same, removed from the tree; the caller owns it */
YamlNode *yaml_take(YamlNode *root, const char *name);
const char *yaml_where(const YamlNode *n); /* "x.yaml:12" or "--a=b"; one of 4 static buffers */
void yaml_free(YamlNode *n);

/* To build trees: texts are copied, yaml_add takes ownership of the child. */
YamlNode *yaml_new(YamlKind kind, const char *key, const char *text, const char *file, int line);
YamlNode *yaml_copy(const YamlNode *n, const char *key);
void yaml_add(YamlNode *parent, YamlNode *child);

/* The value of a reference to a key that the file does not have: the key's default as text, or NULL
 * if there is none. */
typedef const char *YamlDefault(const char *name);

/* The name that a key has in the tree, for a name in a reference; `name` itself if there is no
 * other. */
typedef const char *YamlName(const char *name);

/* Replaces ${...} in n and below by its value:
 *   ${a.b}                        another key, overrides included
 *   ${oc.env:NAME,default}        an environment variable
 *   ${path.choose:a,b}            the first path that exists (or is remote)
 *   ${path.glob:pattern,...}      all matches, a list
 *   ${path.last_checkpoint:dir}   dir/stepN of the highest N
 *   ${path.check_exist:p}         p, or null if it does not exist
 * They nest. A ~/ at the start of a value or an argument becomes $HOME/. Dies on an unknown name, a
 * cycle, a pattern without a match, or a choice if none of its paths exists. */
void yaml_resolve(const YamlNode *root, YamlNode *n, YamlDefault *default_of, YamlName *name_of);
