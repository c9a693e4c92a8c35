/* Prints values of keys as YAML. */
#pragma once
#include <stdio.h>

#include "model/keys/types.h"

/* prints the text after `key:`, such as " 3\n" */
void value_print(FILE *f, const void *holder, const ConfigKey *k, int indent);
/* prints a YAML scalar, quoted if necessary */
void value_print_text(FILE *f, const char *text);
/* returns the first line of value_print, such as "3"; the caller owns it */
char *value_printed(const void *holder, const ConfigKey *k);
