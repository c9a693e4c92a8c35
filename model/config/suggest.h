/* Finds the key that a misspelled name means. */
#pragma once
#include "model/keys/types.h"

/* the key or section of the tables with the most similar name, or NULL */
const char *suggest_key(const ConfigKey *const *tables, int count, const char *name);
