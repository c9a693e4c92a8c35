/* Values of JSON files, described by rows of ConfigKey. */
#pragma once
#include <jansson.h>

#include "model/keys/types.h"

/* parses a value of a file. If it dies, the message names path, key, the value expected and the
 * value found */
void value_json_parse(void *holder, const ConfigKey *k, const json_t *value, const char *path,
                      const char *key);
/* returns a number or a truth value, unchecked */
void value_json_set(void *holder, const ConfigKey *k, double x);
bool value_json_is_nothing(const json_t *value); /* the value is null, false or empty */
_Noreturn void value_json_wrong(const char *path, const char *key, const char *expected,
                                const json_t *found);
