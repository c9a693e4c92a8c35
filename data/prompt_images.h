/* The images that prompts show. */
#pragma once
#include "data/prompts.h"

typedef struct ImageFeatures PromptImages;

/* Opens the folder of features, the configuration's `key`, for images of `rows` rows of `cols` values. Dies if it is not as
 * scripts/make_image_features.py writes it, if a prompt shows an image that it does not have, or one with a value that is not
 * finite. */
PromptImages *prompt_images_open (const Prompts *p, const char *key, const char *folder, int rows, int cols);
void          prompt_images_close(PromptImages *f);             /* NULL: nothing */

/* row[0 .. length of prompt i - 1]: where the features of each token `image_id` are, NULL for other tokens. Returns whether values are
 * F32, else they are BF16. */
bool          prompt_images_rows (const void **row, const PromptImages *f, const Prompts *p, int i, int image_id);
