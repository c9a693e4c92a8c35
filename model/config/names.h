/* Aliases of keys: earlier names, and names in other programs. */
#pragma once
#include "model/keys/yaml.h"

/* The current name of the key or section that has the alias `name`; or `name` itself if it is not
 * an alias. */
const char *names_current(const char *name);
/* the first alias of a key of the table, or NULL */
const char *names_other(const char *name);
/* Warns about each name of an earlier version, unless the file is the config.yaml of a run. Dies if
 * a key is given under two names. The tree does not change. */
void names_check(const YamlNode *root);
/* Replaces aliases in the tree by the names of the table. */
void names_rename(YamlNode *root);
/* What replaces a removed key, or a key of a removed section; NULL: there was no such key. */
const char *names_replacement(const char *name);
