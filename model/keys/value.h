/* Values of keys. `holder`: the Settings, Evaluator or DataSource that holds the value. */
#pragma once
#include "model/keys/types.h"
#include "model/keys/yaml.h"

/* dies naming where, expected, found */
void value_parse(void *holder, const ConfigKey *k, const YamlNode *n);
/* a scalar; NULL: null */
void value_parse_text(void *holder, const ConfigKey *k, const char *text, const char *file);
void value_default(void *holder, const ConfigKey *k);
void value_free(void *holder, const ConfigKey *k);
void value_expected(char *out, size_t size, const ConfigKey *k); /* "an integer from 1 to 8" */
/* the number of an INT, LONG, FLOAT or DOUBLE; else NAN */
double value_number(const void *holder, const ConfigKey *k);
bool value_is_list(int type); /* PATHS, PATTERNS or NAMES */
/* is text (NULL: null) one of the choices? */
bool value_is_listed(const char *choices, const char *text);
/* 1: true, 0: false, as YAML 1.1 spells them; -1: neither */
int value_truth(const char *text);
