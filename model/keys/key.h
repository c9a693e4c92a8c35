/* Functions on single keys of a configuration. */
#pragma once
#include "model/keys/types.h"

const ConfigKey *key_find(const char *name); /* the row of this name; NULL: none */
/* name of the recipe's column, without `format.`; NULL: the key is no column */
const char *key_column(const ConfigKey *k);
/* if the key belongs to elements of a list, length of its prefix in bytes; else 0 */
size_t key_element_prefix(const char *name);
