/* The model that a Hugging Face config.json describes, read and written. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

#include "model/shape/architecture.h"

/* Reads folder/config.json into `m`, with the class's defaults for missing keys, as written by
 * transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters); init_* are unchanged. Dies on a
 * class without a row in architecture.c, and on values outside the ranges of the corresponding keys
 * of the configuration. */
void hf_read(ModelConfig *m, const char *folder);

/* The content of config.json for transformers 4.57 or later; `master`: the type of saved weights.
 * The caller owns it. */
json_t *hf_config(const ModelConfig *c, DType master);
