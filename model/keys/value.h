/* Values of keys. `holder`: the Settings, Evaluator or DataSource that holds the value. */
#pragma once
#include "model/keys/types.h"
#include "model/keys/yaml.h"

/* parses and stores a value. Dies on a wrong value; the message says where it is, what is expected
 * and what was found */
void value_parse(void *holder, const ConfigKey *k, const YamlNode *n);
/* as value_parse, for the text of a scalar; NULL: null */
void value_parse_text(void *holder, const ConfigKey *k, const char *text, const char *file);
void value_default(void *holder, const ConfigKey *k);
void value_free(void *holder, const ConfigKey *k);
void value_expected(char *out, size_t size, const ConfigKey *k); /* "an integer from 1 to 8" */
/* the number of an INT, LONG, FLOAT or DOUBLE; else NAN */
double value_number(const void *holder, const ConfigKey *k);
bool value_is_list(int type); /* the type is PATHS, PATTERNS or NAMES */
/* whether text is one of the choices; NULL: null */
bool value_is_listed(const char *choices, const char *text);
/* returns 1 for true, 0 for false, as YAML 1.1 spells them; -1: neither */
int value_truth(const char *text);
