/* config.json of a LlavaForConditionalGeneration. text_config has the configuration of the text
 * model; the settings of projector and images are next to it. */
#pragma once
#include <jansson.h>

#include "model/shape/config.h"

/* The class and its model_type. */
#define LLAVA_CLASS "LlavaForConditionalGeneration"
#define LLAVA_TYPE "llava"

/* NULL, and m->image of a model of text only, unless `config` is of this class; else its
 * text_config with the class's defaults, which the caller owns, and m->image. Dies on what is not
 * supported; `path`: of the file. */
json_t *llava_text(ModelConfig *m, const json_t *config, const char *path);

/* The content of config.json. text: the text model's configuration, which it takes. Keys that only
 * the loaded file has, such as vision_config, are missing (checkpoint/tokenizer_files.h). */
json_t *llava_config(const ModelConfig *c, json_t *text);
