/* The model that a Hugging Face config.json describes, read and written. */
#pragma once
#include <jansson.h>
#include <stdbool.h>

#include "model/architecture.h"

/* Reads folder/config.json into `m`: what the file says and its class's defaults, in the spelling of transformers 4 (rope_theta,
 * rope_scaling) or 5 (rope_parameters); init_* stay. Dies on a class that no row of architecture.h has, and on values that the
 * configuration's keys of the same meaning could not have. */
void    config_read_hf(ModelConfig *m, const char *folder);

/* Dies if load_path, which is to be read, is no folder that can be: says what it is instead (a name on the hub, another format),
 * and the command that makes a folder of it. `place`: where load_path was given; NULL: unknown. */
void    config_check_source(const char *place, const char *load_path);

/* The contents of config.json, for transformers from 4.57 on; `master`: the type in which weights are saved. The caller owns it. */
json_t *hf_config(const ModelConfig *c, DType master);
