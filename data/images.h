/* Images in token files: rows of features on disk, and which image a token shows. Inside data/
 * only.
 *
 * A token file has `rows` consecutive tokens of image_token_id for each image. Next to the token
 * file is an index file of headerless little-endian numbers: the id of the features (8 bytes), then
 * for each image of the token file, in order, the number of the image in the folder of features (4
 * bytes). The k-th image token of a file shows row k % rows of image index[k / rows], so a sequence
 * may begin or end inside an image.
 *
 * A folder of features has features.json and the files that it names, each with the rows of
 * consecutive images:
 *     {"id": "16 hexadecimal digits", "rows": 576, "cols": 1024, "dtype": "bf16", "files": [["features-0.bf16", images], ...],
 *      "tower_sample": "16 hexadecimal digits", "settings": {...}}
 * tower_sample: the hash of the tower that made the features (model/checkpoint/tower.h); null: no
 * tower.
 * settings: the settings of the model that the features depend on (image_settings.h). */
#pragma once
#include <jansson.h>

#include "data/shard.h"

typedef struct ImageFeatures {
    /* for messages: the configuration's key that names the folder; the caller owns the text */
    const char *key;
    char *folder;
    uint64_t id;
    uint64_t tower;   /* hash of the vision tower that made the features; 0: unknown */
    json_t *settings; /* "settings" of features.json; NULL: the file has no settings */
    int rows, cols;   /* number of rows of an image, and number of values of a row */
    bool f32;         /* values are F32; false: BF16 */
    int num_files;
    const uint8_t **file; /* (num_files) mapped bytes of each file */
    /* (num_files + 1): number of images in all files before file i; the last entry: in all files */
    uint64_t *first;
} ImageFeatures;

/* Opens and checks a folder of features. The configuration's `key` names the folder; the caller
 * keeps the text. Dies if a file is missing, if its size differs from features.json, or if an image
 * does not have `rows` rows and `cols` columns. */
ImageFeatures *features_open(const char *key, const char *folder, int rows, int cols);
/* tower: the hash of the vision tower of `model`; 0: unknown. Dies if the features were made with
 * another tower or with other settings: the size of the features cannot show this. Warns, unless
 * `quiet`, if features.json lacks the tower or the settings. */
void features_check_tower(const ImageFeatures *f, uint64_t tower, const char *model, bool quiet);
void features_close(ImageFeatures *f);           /* NULL is allowed */
uint64_t features_count(const ImageFeatures *f); /* number of images */

/* A row of an image. */
const void *features_at(const ImageFeatures *f, uint32_t image, int row);
/* Whether all values of this row are finite. */
bool features_is_finite(const ImageFeatures *f, const void *row);

/* Bytes of the shard's index of images. */
size_t images_index_bytes(const Shard *s);
/* Index of the shard's i-th image in the folder of features. */
uint32_t images_number(const Shard *s, uint64_t i);

/* The feature row of the shard's k-th image token. */
const void *features_row(const ImageFeatures *f, const Shard *s, uint64_t k);

/* Maps the indexes spec->image_paths, one for each shard, and counts the image tokens of each
 * shard. shards_close frees indexes and counts. Dies if a shard does not have spec->image_rows
 * image tokens per entry of its index, if an entry is larger than the number of images, or if the
 * index was made for other features. */
void images_open(Shard *shards, int num, const DataSpec *spec, const ImageFeatures *f);

/* Number of image tokens before the token `offset`. */
uint64_t images_before(const Shard *s, uint64_t offset, int token);

/* row[0 .. count-1]: pointers to the features of the tokens from `offset` on; NULL for other
 * tokens. Targets that are image tokens become -1. Returns the number of these targets; -1: a
 * feature is not finite, and `error` describes it. */
long images_read(const void **row, int *target, const int *token, const Shard *s,
                 const DataSpec *spec, const ImageFeatures *f, uint64_t offset, int count,
                 char *error, size_t size);
