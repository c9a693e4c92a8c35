/* Images that prompts and questions show. In their tokens an image is as many tokens `image_id` as
 * it has rows of features; next to the tokens are the numbers of the images among the features. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a prompt or a choice may have: ids below `vocab`, `most` tokens. image_rows: tokens of an
 * image; 0: the model reads only text. no_features: if there are no features, a text that says what
 * to do; NULL: there are features. */
typedef struct {
    int vocab, most, image_id, image_rows;
    const char *no_features;
} TokenLimits;

/* Appends the numbers of a JSON list, NULL: none, to image[*count ..], which becomes larger.
 * Returns NULL, or what is wrong with the list, malloc'ed. */
char *shown_images_read(uint32_t **image, size_t *count, const json_t *list);

/* What is wrong with these tokens, which show `images` images, malloc'ed; NULL: nothing. */
char *shown_images_wrong(const int *token, size_t count, size_t images, const TokenLimits *limits);

typedef struct ImageFeatures ShownImages;

/* Opens the folder of features, the value of the configuration's `key`, for images of `rows` rows
 * of `cols` values. Dies if it is not as scripts/make_image_features.py writes it, and if one of
 * these images is not in it, or has a value that is not finite. */
ShownImages *shown_images_open(const char *key, const char *folder, int rows, int cols,
                               const uint32_t *image, size_t count);
/* features_check_tower */
void shown_images_check_tower(const ShownImages *f, uint64_t tower, const char *model, bool quiet);
void shown_images_close(ShownImages *f);        /* NULL: nothing */
uint64_t shown_images_id(const ShownImages *f); /* id of the folder */
bool shown_images_f32(const ShownImages *f);    /* values are F32, else BF16 */

/* row[0 .. count - 1]: where the features of each token `image_id` are, NULL for other tokens.
 * image: those that the tokens show. */
void shown_images_rows(const void **row, const ShownImages *f, const int *token, int count,
                       int image_id, const uint32_t *image);
