/* Other names of keys. */
#pragma once
#include "model/keys/yaml.h"

/* the table's name of this key or section; `name` itself if it is none's other name */
const char *names_current(const char *name);
/* the first other name of the table's key, or NULL */
const char *names_other(const char *name);
/* Warns at each name of earlier versions in the tree, which keeps it, unless the file is that of a
 * run, and dies if a key has two. */
void names_check(const YamlNode *root);
/* Gives all keys the table's names. */
void names_rename(YamlNode *root);
/* what replaces a key that was removed, or one of a section that was; NULL: `name` was no key */
const char *names_replacement(const char *name);
