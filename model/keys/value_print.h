/* Values of keys as YAML. */
#pragma once
#include <stdio.h>

#include "model/keys/types.h"

/* " 3\n": the text after `key:` */
void value_print(FILE *f, const void *holder, const ConfigKey *k, int indent);
/* a YAML scalar, quoted where it must be */
void value_print_text(FILE *f, const char *text);
/* "3": the first line of value_print; the caller owns it */
char *value_printed(const void *holder, const ConfigKey *k);
