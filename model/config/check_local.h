/* Checks that paths are local. */
#pragma once
#include "model/config/reader.h"

/* Dies if a path of the key is a URL. */
void check_local(Reader *r, const char *key, char **paths, int count);
