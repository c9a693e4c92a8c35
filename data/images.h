/* Images in token files: rows of features on disk, and which image a place in a file shows. Inside
 * data/ only.
 *
 * A token file has `rows` consecutive tokens of image_token_id for each image. Next to it is its
 * index, headerless little-endian numbers: the id of the features (8 bytes), then for each image,
 * in order, its number among the features (4 bytes). The k-th of these tokens in a file shows row k
 * % rows of image index[k / rows], so images may be cut anywhere.
 *
 * A folder of features has features.json and the files that it names, each with the rows of some
 * images one after the other:
 *     {"id": "16 hexadecimal digits", "rows": 576, "cols": 1024, "dtype": "bf16", "files": [["features-0.bf16", images], ...],
 *      "tower_sample": "16 hexadecimal digits", "settings": {...}}
 * tower_sample: the hash of the tower that made the features (model/checkpoint/tower.h); null: no
 * tower.
 * settings: the settings of the model that the features depend on (image_settings.h). */
#pragma once
#include <jansson.h>

#include "data/shard.h"

typedef struct ImageFeatures {
    /* the key that names the folder in the configuration, for messages; the caller owns it */
    const char *key;
    char *folder;
    uint64_t id;
    uint64_t tower;   /* hash of the vision tower that made the features; 0: unknown */
    json_t *settings; /* of features.json; NULL: it has none */
    int rows, cols;   /* rows and values per row of an image */
    bool f32;         /* values are F32; false: BF16 */
    int num_files;
    const uint8_t **file; /* (num_files) mapped */
    /* (num_files + 1): images in all files before this one; the last: in all */
    uint64_t *first;
} ImageFeatures;

/* Opens and checks a folder, whose name is the value of `key`, which must stay: dies if a file is
 * missing, if its size differs from features.json, or if an image does not have `rows` rows and
 * `cols` columns. */
ImageFeatures *features_open(const char *key, const char *folder, int rows, int cols);
/* Dies if the features were made with another tower than `model`'s, whose hash is `tower` (0:
 * unknown), or with other settings. The size of the features cannot show this. Warns, unless
 * `quiet`, if features.json lacks the tower or the settings. */
void features_check_tower(const ImageFeatures *f, uint64_t tower, const char *model, bool quiet);
void features_close(ImageFeatures *f);           /* NULL: nothing */
uint64_t features_count(const ImageFeatures *f); /* of images */

/* features_at: a row of an image. features_is_finite: whether all values of the row are finite. */
const void *features_at(const ImageFeatures *f, uint32_t image, int row);
bool features_is_finite(const ImageFeatures *f, const void *row);

/* Bytes of the shard's index, and the number of its i-th image. */
size_t images_index_bytes(const Shard *s);
uint32_t images_number(const Shard *s, uint64_t i);

/* The row that the shard's k-th token of image_token_id shows. */
const void *features_row(const ImageFeatures *f, const Shard *s, uint64_t k);

/* Maps the indexes spec->image_paths, one for each shard, and counts the image tokens of each
 * shard. shards_close frees both. Dies if a shard does not have spec->image_rows image tokens per
 * entry of its index, if an entry is larger than the number of images, or if the index was made for
 * other features. */
void images_open(Shard *shards, int num, const DataSpec *spec, const ImageFeatures *f);

/* How many image tokens are before the token `offset`. */
uint64_t images_before(const Shard *s, uint64_t offset, int token);

/* row[0 .. count-1]: pointers to the features of the tokens from `offset` on; NULL for tokens of
 * text. Targets that are image tokens become -1. Returns the number of these targets; -1: a feature
 * is not finite, and `error` describes it. */
long images_read(const void **row, int *target, const int *token, const Shard *s,
                 const DataSpec *spec, const ImageFeatures *f, uint64_t offset, int count,
                 char *error, size_t size);
