/* The model that a Hugging Face config.json describes. */
#pragma once
#include "model/config.h"

/* Reads the architecture of a Hugging Face config.json into `m` (only what the file says); dies on an architecture
 * that is none of Llama, OLMo, OLMo-2. config_load does so when the file has `load_path` and no `model` section. */
void    config_read_hf(ModelConfig *m, const char *folder);
