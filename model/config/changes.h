/* The settings that differ from the defaults. */
#pragma once
#include "model/config/reader.h"

/* its value is; false if that follows from others */
bool changes_is_default(const Reader *r, const ConfigKey *k);
/* Config.changes; the caller owns it. Call before resolved_write */
char *changes_text(const Reader *r, bool from_hf);
