/* Reads and writes the config.json of Hugging Face models. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

#include "model/shape/architecture.h"

/* Reads folder/config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters),
 * into `m`. Missing keys get the defaults of the class; init_* do not change. Dies on a class
 * without a row in architecture.c, and on values outside the ranges of the corresponding keys of
 * the configuration. */
void hf_read(ModelConfig *m, const char *folder);

/* The content of config.json for transformers 4.57 or later; `master`: the type of saved weights.
 * The caller owns it. */
json_t *hf_config(const ModelConfig *c, DType master);
