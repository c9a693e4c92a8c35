/* The keys of the configuration. */
#pragma once
#include "model/keys/types.h"

/* ends with name == NULL; keys of a section are adjacent */
extern const ConfigKey config_keys[];
