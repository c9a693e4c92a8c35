/* A YAML file as a tree of values that know where they were written, with command-line overrides merged in and
 * OmegaConf's ${...} evaluated where a value is used. Knows nothing about which keys exist. */
#pragma once

typedef enum { YAML_SCALAR, YAML_LIST, YAML_MAP } YamlKind;

typedef struct YamlNode YamlNode;
struct YamlNode {
    YamlKind   kind;
    char      *key;            /* name in the enclosing map; NULL in lists and at the root          */
    char      *text;           /* of a scalar; NULL: null                                           */
    char      *file;           /* where it was written; for line 0 the command-line argument itself */
    int        line;
    YamlNode **child;          /* of a list or map, in order; owned                                 */
    int        num_children;
};

/* Reads a file. Dies with file:line on a syntax error or a key given twice. */
YamlNode *yaml_load(const char *path);

/* The same of a text, which `name` stands for in messages; what it holds has no lines. */
YamlNode *yaml_parse(const char *text, const char *name);

/* Merges "--a.b=value" (or "--a.b": true) into the tree; a dash in the key is read as an underscore. A value that
 * starts with [ { " or ' is YAML; any other is taken as it is, `null` and nothing meaning null. */
void yaml_override(YamlNode *root, const char *argument);

/* Merges n, which is used up and has no key, into the tree as "a.b". */
void yaml_put(YamlNode *root, const char *name, YamlNode *n);

YamlNode   *yaml_find (const YamlNode *root, const char *name);     /* "a.b"; NULL: not there */
const char *yaml_place(const YamlNode *n);                          /* "x.yaml:12" or "--a=b"; static, 4 live */
void        yaml_free (YamlNode *n);

/* Building blocks for those who make trees. Nothing is shared: texts are copied, children handed over. */
YamlNode *yaml_new (YamlKind kind, const char *key, const char *text, const char *file, int line);
YamlNode *yaml_copy(const YamlNode *n, const char *key);
void      yaml_add (YamlNode *parent, YamlNode *child);

/* What a reference gets that names no key of the file: the default of that key as text, or NULL if there is none. */
typedef const char *YamlDefault(const char *name);

/* Replaces ${...} in n and below by its value:
 *   ${a.b}                        another key, overrides included
 *   ${oc.env:NAME,default}        an environment variable
 *   ${path.choose:a,b}            the first that exists (or is remote)
 *   ${path.glob:pattern,...}      all matches, a list
 *   ${path.last_checkpoint:dir}   dir/stepN of the highest N
 *   ${path.check_exist:p}         p, or null if it does not exist
 * They nest. A ~/ at the start of a value or an argument becomes $HOME/. Dies on an unknown name, a cycle, a pattern without a
 * match, a choice of which nothing exists. */
void yaml_resolve(const YamlNode *root, YamlNode *n, YamlDefault *default_of);
