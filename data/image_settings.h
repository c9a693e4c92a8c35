/* What features of images depend on besides the images and the weights of the vision tower:
 * settings in the model's folder. Inside data/ only.
 *
 * features.json has them as scripts/image_settings.py writes them, each with the value that made
 * the features and the value of a folder that does not say it:
 *     "settings": {"config": {"vision_feature_layer": [-2, -2], ...}, "vision_config": {"hidden_act": ["gelu", "quick_gelu"], ...},
 *                  "image_processor": {"size": [{"shortest_edge": 336}, {"shortest_edge": 224}], ...}}
 * config: keys of config.json; vision_config: of that object in it; image_processor: of that object
 * in processor_config.json, or else keys of preprocessor_config.json. */
#pragma once
#include <jansson.h>

/* Compares the settings with those in the folder of a model. Returns a text about the difference,
 * which the caller owns; NULL: there is none, or the folder has no vision_config. If the folder
 * lacks a file, the settings of that file are not compared. */
char *image_settings_differing(const json_t *settings, const char *model);
