/* Single keys of a configuration. */
#pragma once
#include "model/keys/types.h"

const ConfigKey *key_find(const char *name); /* the row of that name, or NULL */
/* name of the recipe's column, without `format.`, or NULL */
const char *key_column(const ConfigKey *k);
/* bytes of its prefix if it is a key of elements, else 0 */
size_t key_element_prefix(const char *name);
