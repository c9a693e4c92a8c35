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
/* Dies if the key is one of OLMo or COAT that only scripts/convert_config.py reads. */
void names_refuse_foreign(const char *where, const char *name);
