/* Checks the settings of adapters: the keys lora.*. */
#pragma once
#include "model/config/reader.h"

/* If Config.load_folder has adapters, sets lora.base_path. Dies if that folder has no model. */
void check_lora_find_base(Reader *r);
/* the default learning rate of a run without a configuration file */
void check_lora_choose_rate(Reader *r);
/* Fills ModelConfig.lora. Call it after the checks of model and recipe. */
void check_lora(Reader *r);
