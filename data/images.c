/* Features of images, and the index of a token file. */
#include "data/images.h"

#include "data/image_settings.h"
#include "data/map.h"
#include "kernels/runtime/error.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char PATHS_KEY[] = "data.image_paths",
                  MAKE[] = "make it again with scripts/make_image_features.py";

/* BLOCK: tokens between two counts of image tokens. ID_BYTES: bytes of the id at the start of an
 * index */
enum { BLOCK = 4096, ID_BYTES = 8 };

/* ---- features -------------------------------------------------------------------------------- */

static size_t item_bytes(const ImageFeatures *f)
{
    return f->f32 ? 4 : 2;
}

static size_t row_bytes(const ImageFeatures *f)
{
    return (size_t)f->cols * item_bytes(f);
}

static size_t image_bytes(const ImageFeatures *f)
{
    return (size_t)f->rows * row_bytes(f);
}

static int positive(const ImageFeatures *f, const json_t *o, const char *key, const char *path)
{
    const json_t *value = json_object_get(o, key);
    const json_int_t x = json_integer_value(value);
    if (x < 1 || x > 1 << 24)
        die("%s: %s: \"%s\" must be a number from 1 to %d; %s", f->key, path, key, 1 << 24, MAKE);
    return (int)x;
}

static void open_file(ImageFeatures *f, const json_t *entry, const char *path, int i)
{
    const char *name = json_string_value(json_array_get(entry, 0));
    const json_int_t images = json_integer_value(json_array_get(entry, 1));
    size_t bytes;
    if (!name || strchr(name, '/') || images < 1 || images > UINT32_MAX)
        die("%s: %s: entry %d of \"files\" must be [name, number of images]; %s", f->key, path, i,
            MAKE);
    char *file = xasprintf("%s/%s", f->folder, name);
    f->file[i] = map_file(&bytes, f->key, file);
    f->first[i + 1] = f->first[i] + (uint64_t)images;
    if (bytes != (uint64_t)images * image_bytes(f))
        die("%s: %s has %zu bytes; %lld images of %d rows of %d values of %zu bytes need %llu "
            "bytes: truncated? Copy it again, or %s",
            f->key, file, bytes, (long long)images, f->rows, f->cols, item_bytes(f),
            (unsigned long long)images * image_bytes(f), MAKE);
    free(file);
}

static void check_sizes(const ImageFeatures *f, int rows, int cols, const char *path)
{
    if (f->cols != cols)
        die("%s: %s: a row has %d values, but the model's projector reads %d "
            "(model.image_feature_size): these are features of another vision tower. Make the "
            "features again with the model's folder",
            f->key, path, f->cols, cols);
    if (f->rows != rows)
        die("%s: %s: an image has %d rows, but the model has %d tokens for each "
            "(model.image_tokens). Make the features again with the model's folder",
            f->key, path, f->rows, rows);
}

static void read_tower(ImageFeatures *f, const json_t *o)
{
    const char *text = json_string_value(json_object_get(o, "tower_sample"));
    if (!text || sscanf(text, "%" SCNx64, &f->tower) != 1)
        f->tower = 0;
    f->settings = json_incref(json_object_get(o, "settings"));
}

ImageFeatures *features_open(const char *key, const char *folder, int rows, int cols)
{
    ImageFeatures *f = xcalloc(1, sizeof *f);
    f->key = key;
    f->folder = xstrdup(folder);
    char *path = xasprintf("%s/features.json", f->folder);
    json_error_t error;
    json_t *o = json_load_file(path, 0, &error);
    const char *id = json_string_value(json_object_get(o, "id")),
               *dtype = json_string_value(json_object_get(o, "dtype"));
    const json_t *files = json_object_get(o, "files");
    if (!o)
        die("%s: %s: %s; expected the folder that scripts/make_image_features.py wrote", f->key,
            path, error.text);
    if (!id || sscanf(id, "%" SCNx64, &f->id) != 1 || !dtype || json_array_size(files) == 0)
        die("%s: %s lacks \"id\", \"dtype\" or \"files\"; %s", f->key, path, MAKE);
    if (strcmp(dtype, "bf16") != 0 && strcmp(dtype, "f32") != 0)
        die("%s: %s: \"dtype\" is %.16s; expected bf16 or f32", f->key, path, dtype);
    f->f32 = strcmp(dtype, "f32") == 0;
    f->rows = positive(f, o, "rows", path);
    f->cols = positive(f, o, "cols", path);
    check_sizes(f, rows, cols, path);
    read_tower(f, o);
    f->num_files = (int)json_array_size(files);
    f->file = xcalloc((size_t)f->num_files, sizeof *f->file);
    f->first = xcalloc((size_t)f->num_files + 1, sizeof *f->first);
    for (int i = 0; i < f->num_files; i++)
        open_file(f, json_array_get(files, (size_t)i), path, i);
    json_decref(o);
    free(path);
    return f;
}

static void check_settings(const ImageFeatures *f, const char *model, bool quiet)
{
    if (!f->settings && !quiet)
        warn("%s: %s/features.json does not say how its features were made (\"settings\"), so the "
             "features are not compared with %s. "
             "scripts/make_image_features.py --model %s with the same --output compares them",
             f->key, f->folder, model, model);
    char *wrong = f->settings ? image_settings_differing(f->settings, model) : NULL;
    if (wrong)
        die("%s: %s/features.json: the settings of these features differ from the settings of %s: "
            "%s. Make the features again: scripts/make_image_features.py --model %s",
            f->key, f->folder, model, wrong, model);
}

void features_check_tower(const ImageFeatures *f, uint64_t tower, const char *model, bool quiet)
{
    if (tower == 0)
        return;
    if (f->tower == 0 && !quiet)
        warn("%s: %s/features.json does not name the vision tower of its features "
             "(\"tower_sample\"), so the features are not compared with the tower of %s",
             f->key, f->folder, model);
    if (f->tower != 0 && f->tower != tower)
        die("%s: %s/features.json: the features were made with a vision tower whose weights "
            "(%016" PRIx64 ") differ from the tower of %s (%016" PRIx64
            "). Make the features again: scripts/make_image_features.py --model %s",
            f->key, f->folder, f->tower, model, tower, model);
    check_settings(f, model, quiet);
}

void features_close(ImageFeatures *f)
{
    if (!f)
        return;
    for (int i = 0; i < f->num_files; i++)
        unmap_file(f->file[i]);
    json_decref(f->settings);
    free(f->file);
    free(f->first);
    free(f->folder);
    free(f);
}

uint64_t features_count(const ImageFeatures *f)
{
    return f->first[f->num_files];
}

const void *features_at(const ImageFeatures *f, uint32_t image, int row)
{
    int i = 0;
    while (f->first[i + 1] <= image)
        i++;
    return f->file[i] + (image - f->first[i]) * image_bytes(f) + (size_t)row * row_bytes(f);
}

const void *features_row(const ImageFeatures *f, const Shard *s, uint64_t k)
{
    return features_at(f, images_number(s, k / (uint64_t)f->rows), (int)(k % (uint64_t)f->rows));
}

bool features_is_finite(const ImageFeatures *f, const void *row)
{
    for (int c = 0; c < f->cols; c++) {
        uint16_t upper; /* sign, exponent and first digits of a BF16 or F32 value */
        memcpy(&upper, (const char *)row + (size_t)c * item_bytes(f) + (f->f32 ? 2 : 0),
               sizeof upper);
        if ((upper & 0x7f80) == 0x7f80)
            return false;
    }
    return true;
}

/* ---- the index of a shard -------------------------------------------------------------------- */

static void count_tokens(Shard *s, const DataSpec *spec)
{
    const uint64_t blocks = s->num_tokens / BLOCK + 1;
    s->images_before = xcalloc(blocks + 1, sizeof *s->images_before);
    for (uint64_t i = 0; i < s->num_tokens; i++)
        s->images_before[i / BLOCK + 1] += token_at(s, i) == (uint32_t)spec->image_token_id;
    for (uint64_t b = 0; b < blocks; b++)
        s->images_before[b + 1] += s->images_before[b];
}

static void check_entries(const Shard *s, const ImageFeatures *f, const char *key, const char *path)
{
    const uint64_t most = features_count(f);
    for (uint64_t i = 0; i < s->num_images; i++)
        if (images_number(s, i) >= most)
            die("%s: %s: entry %llu (counted from 0) is image %u, but %s has %llu images. Give the "
                "features with which the tokens "
                "were made",
                key, path, (unsigned long long)i, images_number(s, i), f->folder,
                (unsigned long long)most);
}

/* For messages: the configuration's name of the data that spec describes. */
static const char *key_of(const DataSpec *spec, const char *key)
{
    return spec->key ? spec->key : key;
}

/* The arguments of open_index. */
typedef struct {
    const DataSpec *spec;
    const ImageFeatures *features;
} Opening;

static void open_index(void *who, Shard *s, const char *path)
{
    const DataSpec *spec = ((const Opening *)who)->spec;
    const ImageFeatures *f = ((const Opening *)who)->features;
    const char *key = key_of(spec, PATHS_KEY);
    size_t bytes;
    uint64_t id;
    shard_tell(spec, "counting the images of", s->path);
    s->image_map = map_file(&bytes, key, path);
    if (bytes < ID_BYTES || (bytes - ID_BYTES) % sizeof(uint32_t) != 0)
        die("%s: %s has %zu bytes; expected %d bytes, and 4 bytes for each image. The file may "
            "be truncated: make it again with scripts/make_chat_shards.py",
            key, path, bytes, ID_BYTES);
    memcpy(&id, s->image_map, sizeof id);
    if (id != f->id)
        die("%s: %s was made for features with the id %016" PRIx64 ", but %s has %016" PRIx64
            ". Give the features with which the "
            "tokens were made, or make the tokens again",
            key, path, id, f->folder, f->id);
    s->num_images = (bytes - ID_BYTES) / sizeof(uint32_t);
    count_tokens(s, spec);
    const uint64_t tokens = s->images_before[s->num_tokens / BLOCK + 1],
                   expected = s->num_images * (uint64_t)f->rows;
    if (tokens != expected)
        die("%s: %s has %llu images of %d tokens each, %llu tokens in all, but %s has %llu tokens "
            "with the id %d (model.image_token_id). Does the index belong to these tokens?",
            key, path, (unsigned long long)s->num_images, f->rows, (unsigned long long)expected,
            s->path, (unsigned long long)tokens, spec->image_token_id);
    check_entries(s, f, key, path);
}

void images_open(Shard *shards, int num, const DataSpec *spec, const ImageFeatures *f)
{
    Opening o = { spec, f };
    const char *key = spec->key ? xasprintf("%s: image_paths", spec->key) : xstrdup(PATHS_KEY);
    shards_open_others(shards, num, spec, key, spec->image_paths, spec->num_image_paths, open_index,
                       &o);
    free((char *)key);
}

size_t images_index_bytes(const Shard *s)
{
    return ID_BYTES + s->num_images * sizeof(uint32_t);
}

uint32_t images_number(const Shard *s, uint64_t i)
{
    uint32_t image;
    memcpy(&image, (const char *)s->image_map + ID_BYTES + i * sizeof image, sizeof image);
    return image;
}

uint64_t images_before(const Shard *s, uint64_t offset, int token)
{
    uint64_t n = s->images_before[offset / BLOCK];
    for (uint64_t i = offset / BLOCK * BLOCK; i < offset; i++)
        n += token_at(s, i) == (uint32_t)token;
    return n;
}

/* Whether the shard may have this token: without an index a shard must not have image tokens. */
static bool may_show(const Shard *s, const ImageFeatures *f, const DataSpec *spec, uint64_t offset,
                     char *error, size_t size)
{
    if (f && s->image_map)
        return true;
    snprintf(error, size,
             "%s: %s: token %llu (counted from 0) is %d (model.image_token_id), which stands for a "
             "row of an image, but the file has no index of images: give %s and "
             "data.image_features, or leave this file out",
             s->key, s->path, (unsigned long long)offset, spec->image_token_id, PATHS_KEY);
    return false;
}

long images_read(const void **row, int *target, const int *token, const Shard *s,
                 const DataSpec *spec, const ImageFeatures *f, uint64_t offset, int count,
                 char *error, size_t size)
{
    long masked = 0;
    uint64_t k = s->image_map ? images_before(s, offset, spec->image_token_id) : 0;
    for (int t = 0; t < count; t++) {
        row[t] = NULL;
        if (target[t] == spec->image_token_id) {
            target[t] = -1;
            masked++;
        }
        if (token[t] != spec->image_token_id)
            continue;
        if (!may_show(s, f, spec, offset + (uint64_t)t, error, size))
            return -1;
        row[t] = features_row(f, s, k);
        if (!features_is_finite(f, row[t])) {
            snprintf(error, size, "%s: %s: row %llu of image %u has a value that is not finite; %s",
                     f->key, f->folder, (unsigned long long)(k % (uint64_t)f->rows),
                     images_number(s, k / (uint64_t)f->rows), MAKE);
            return -1;
        }
        k++;
    }
    return masked;
}
