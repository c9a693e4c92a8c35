/* The settings of a model's folder on which image features depend. (The features also depend on the
 * images and on the weights of the vision tower.) Inside data/ only.
 *
 * features.json contains the settings as scripts/image_settings.py writes them. Each setting has
 * two values: the value that made the features, and the default of a folder without the setting:
 *     "settings": {"config": {"vision_feature_layer": [-2, -2], ...}, "vision_config": {"hidden_act": ["gelu", "quick_gelu"], ...},
 *                  "image_processor": {"size": [{"shortest_edge": 336}, {"shortest_edge": 224}], ...}}
 * config: keys of config.json. vision_config: keys of the object vision_config in config.json.
 * image_processor: keys of the object image_processor in processor_config.json; if there is none,
 * keys of preprocessor_config.json. */
#pragma once
#include <jansson.h>

/* Compares the settings with the settings in a model's folder. Returns a description of the
 * difference, which the caller owns; NULL: they are equal, or the folder has no vision_config.
 * Settings of a file that the folder lacks are not compared. */
char *image_settings_differing(const json_t *settings, const char *model);
