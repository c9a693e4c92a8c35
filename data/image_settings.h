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

/* What differs in the folder of a model, as a text that the caller owns; NULL: nothing, or the
 * folder has no vision_config. Without the file of a part, that part is not compared. */
char *image_settings_differing(const json_t *settings, const char *model);
