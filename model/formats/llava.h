/* config.json of LlavaForConditionalGeneration. text_config has the configuration of the text
 * model; the settings of the projector and of images are next to text_config. */
#pragma once
#include <jansson.h>

#include "model/shape/config.h"

/* Names of the class and of its model_type. */
#define LLAVA_CLASS "LlavaForConditionalGeneration"
#define LLAVA_TYPE "llava"

/* If `config` is of this class, sets m->image and returns text_config with the class's defaults,
 * which the caller owns. Otherwise returns NULL and sets m->image to the values of a model that
 * reads only text. Dies on unsupported settings; `path`: path of the file. */
json_t *llava_text(ModelConfig *m, const json_t *config, const char *path);

/* The content of config.json. text: the text model's configuration; the function takes ownership.
 * Keys that only the loaded file has, such as vision_config, are missing (see
 * checkpoint/tokenizer_files.h). */
json_t *llava_config(const ModelConfig *c, json_t *text);
