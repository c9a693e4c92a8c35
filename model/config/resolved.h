/* Prints the resolved configuration. */
#pragma once
#include <jansson.h>

#include "model/keys/types.h"

void resolved_write(Settings *s); /* fills Config.text */
/* sets the FOLLOWS keys that are null in s to the values that they stand for */
Settings resolved_followed(const Settings *s);
/* JSON object with the value of each recipe column of the run; the caller owns it */
json_t *resolved_columns(const Config *c);
/* The value of this key's column; NULL: there is none. The object keeps ownership. */
const char *resolved_column_in(const json_t *columns, const ConfigKey *k);
