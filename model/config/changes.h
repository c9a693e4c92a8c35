/* The settings that differ from the defaults. */
#pragma once
#include "model/config/reader.h"

/* Whether the key has its default value. False if another key sets it. */
bool changes_is_default(const Reader *r, const ConfigKey *k);
/* Makes the text Config.changes, which the caller owns. Call before resolved_write. */
char *changes_text(const Reader *r, bool from_hf);
