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
 * tower_sample: the hash of the tower that made them (model/checkpoint/tower.h); null: none.
 * settings: what they depend on besides (image_settings.h). */
#pragma once
#include <jansson.h>

#include "data/shard.h"

typedef struct ImageFeatures {
    /* the configuration's name of the folder, for messages; the caller's */
    const char *key;
    char *folder;
    uint64_t id;
    uint64_t tower;   /* hash of the vision tower that made them; 0: not said */
    json_t *settings; /* NULL: not said */
    int rows, cols;   /* of an image */
    bool f32;         /* values are F32, else BF16 */
    int num_files;
    const uint8_t **file; /* (num_files) mapped */
    /* (num_files + 1): images in all files before this one; the last: in all */
    uint64_t *first;
} ImageFeatures;

/* Opens and checks a folder, whose name is the value of `key`, which must stay: dies if a file is
 * missing or has another size than features.json says, and if an image has other numbers of rows
 * and columns than these. */
ImageFeatures *features_open(const char *key, const char *folder, int rows, int cols);
/* Dies if they are of another tower than that of the folder `model`, whose hash is `tower` (0:
 * unknown), or were made with other settings. All these give features of the same size. Warns,
 * unless `quiet`, if features.json does not say tower or settings. */
void features_check_tower(const ImageFeatures *f, uint64_t tower, const char *model, bool quiet);
void features_close(ImageFeatures *f);           /* NULL: nothing */
uint64_t features_count(const ImageFeatures *f); /* of images */

/* A row of an image; and whether all its values are finite. */
const void *features_at(const ImageFeatures *f, uint32_t image, int row);
bool features_is_finite(const ImageFeatures *f, const void *row);

/* Bytes of the shard's index, and the number of its i-th image. */
size_t images_index_bytes(const Shard *s);
uint32_t images_number(const Shard *s, uint64_t i);

/* The row that the shard's k-th token of image_token_id shows. */
const void *features_row(const ImageFeatures *f, const Shard *s, uint64_t k);

/* Maps the indexes spec->image_paths, one for each shard, and counts the shards' image tokens;
 * shards_close is the end of both. Dies if these are not spec->image_rows for each entry, if an
 * entry is beyond the features, and if an index was made for others. */
void images_open(Shard *shards, int num, const DataSpec *spec, const ImageFeatures *f);

/* How many image tokens are before the token `offset`. */
uint64_t images_before(const Shard *s, uint64_t offset, int token);

/* row[0 .. count-1]: where the features of tokens from `offset` on are, NULL for other tokens;
 * targets that are the image's token become -1. Returns how many targets did; -1: a feature is not
 * finite, described in `error`. */
long images_read(const void **row, int *target, const int *token, const Shard *s,
                 const DataSpec *spec, const ImageFeatures *f, uint64_t offset, int count,
                 char *error, size_t size);
