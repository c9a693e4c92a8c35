/* The images that prompts and questions show. In the tokens, an image is a run of tokens
 * `image_id`, one for each row of its features. Next to the tokens are the images' indexes in the
 * folder of features. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Limits of a prompt or a choice. */
typedef struct {
    /* ids are below vocab. most: maximum number of tokens. image_rows: number of tokens of an
     * image; 0: the model reads only text */
    int vocab, most, image_id, image_rows;
    /* why there are no features, and what to do; NULL: there are features */
    const char *no_features;
} TokenLimits;

/* Appends the indexes of a JSON list (NULL: none) to *image, an array with *count elements, which
 * grows. Returns NULL, or an error text about the list, malloc'ed. */
char *shown_images_read(uint32_t **image, size_t *count, const json_t *list);

/* Returns an error text, malloc'ed, if these tokens do not fit the limits or do not show `images`
 * images; else NULL. */
char *shown_images_wrong(const int *token, size_t count, size_t images, const TokenLimits *limits);

typedef struct ImageFeatures ShownImages;

/* Opens the folder of features. The configuration's `key` names the folder. Each image has `rows`
 * rows of `cols` values. Dies if scripts/make_image_features.py did not write the folder in this
 * form, or if the features of one of the `count` images are missing or not finite. */
ShownImages *shown_images_open(const char *key, const char *folder, int rows, int cols,
                               const uint32_t *image, size_t count);
/* see features_check_tower */
void shown_images_check_tower(const ShownImages *f, uint64_t tower, const char *model, bool quiet);
void shown_images_close(ShownImages *f);        /* NULL is allowed */
uint64_t shown_images_id(const ShownImages *f); /* id of the folder */
bool shown_images_f32(const ShownImages *f);    /* whether values are F32; false: BF16 */

/* row[0 .. count - 1]: pointers to the features of each token `image_id`; NULL for other tokens.
 * image: the indexes of the images that the tokens show. */
void shown_images_rows(const void **row, const ShownImages *f, const int *token, int count,
                       int image_id, const uint32_t *image);
