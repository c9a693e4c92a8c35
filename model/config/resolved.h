/* The resolved configuration as text. */
#pragma once
#include <jansson.h>

#include "model/keys/types.h"

void resolved_write(Settings *s); /* fills Config.text */
/* s with FOLLOWS keys set to their values for null */
Settings resolved_followed(const Settings *s);
/* name: value of each column of the run; the caller owns it */
json_t *resolved_columns(const Config *c);
/* The value of that key's column, or NULL; borrowed. */
const char *resolved_column_in(const json_t *columns, const ConfigKey *k);
