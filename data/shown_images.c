#include "data/shown_images.h"

#include "data/images.h"
#include "kernels/runtime/error.h"

#include <stdlib.h>

char *shown_images_read(uint32_t **image, size_t *count, const json_t *list)
{
    const size_t n = json_array_size(list);
    if (list && !json_is_array(list))
        return xasprintf("\"images\" is not a list; expected numbers of images, as [0, 7]");
    *image = xrealloc(*image, sizeof **image * (*count + n + 1));
    for (size_t i = 0; i < n; i++) {
        const json_t *number = json_array_get(list, i);
        const json_int_t x = json_integer_value(number);
        if (!json_is_integer(number) || x < 0 || x > UINT32_MAX)
            return xasprintf("element %zu of the images is not the number of an image", i);
        (*image)[(*count)++] = (uint32_t)x;
    }
    return NULL;
}

char *shown_images_wrong(const int *token, size_t count, size_t images, const TokenLimits *limits)
{
    size_t tokens = 0;
    for (size_t i = 0; i < count && limits->image_rows > 0; i++)
        tokens += token[i] == limits->image_id;
    if (images > 0 && limits->image_rows == 0)
        return xasprintf("there are images, but the model reads only text");
    if (tokens != images * (size_t)limits->image_rows)
        return xasprintf("%zu tokens are %d (model.image_token_id), and there are %zu images; "
                         "expected %d tokens for each image",
                         tokens, limits->image_id, images, limits->image_rows);
    if (images > 0 && limits->no_features)
        return xasprintf("there are images, but no features of them; %s", limits->no_features);
    return NULL;
}

ShownImages *shown_images_open(const char *key, const char *folder, int rows, int cols,
                               const uint32_t *image, size_t count)
{
    ShownImages *f = features_open(key, folder, rows, cols);
    for (size_t i = 0; i < count; i++) {
        if (image[i] >= features_count(f))
            die("%s: image %u is shown, but %s has %llu images, numbered from 0: were other "
                "features given?",
                key, image[i], folder, (unsigned long long)features_count(f));
        for (int row = 0; row < rows; row++)
            if (!features_is_finite(f, features_at(f, image[i], row)))
                die("%s: %s: row %d of image %u has a value that is not finite; make it again with "
                    "scripts/make_image_features.py",
                    key, folder, row, image[i]);
    }
    return f;
}

void shown_images_check_tower(const ShownImages *f, uint64_t tower, const char *model, bool quiet)
{
    features_check_tower(f, tower, model, quiet);
}

void shown_images_close(ShownImages *f)
{
    features_close(f);
}

uint64_t shown_images_id(const ShownImages *f)
{
    return f->id;
}

bool shown_images_f32(const ShownImages *f)
{
    return f->f32;
}

void shown_images_rows(const void **row, const ShownImages *f, const int *token, int count,
                       int image_id, const uint32_t *image)
{
    size_t k = 0;
    for (int t = 0; t < count; t++) {
        row[t] = NULL;
        if (token[t] != image_id)
            continue;
        row[t] = features_at(f, image[k / (size_t)f->rows], (int)(k % (size_t)f->rows));
        k++;
    }
}
