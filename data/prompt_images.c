#include "data/prompt_images.h"

#include "data/images.h"
#include "kernels/runtime/error.h"

static void check_image(const PromptImages *f, int prompt, uint32_t image)
{
    if (image >= features_count(f))
        die("%s: prompt %d shows image %u, but %s has %llu images, numbered from 0", f->key, prompt, image, f->folder,
            (unsigned long long)features_count(f));
    for (int row = 0; row < f->rows; row++)
        if (!features_is_finite(f, features_at(f, image, row)))
            die("%s: %s: row %d of image %u has a value that is not finite; make it again with scripts/make_image_features.py", f->key,
                f->folder, row, image);
}

PromptImages *prompt_images_open(const Prompts *p, const char *key, const char *folder, int rows, int cols)
{
    PromptImages *f = features_open(key, folder, rows, cols);
    for (int i = 0; i < p->count; i++)
        for (size_t k = p->first_image[i]; k < p->first_image[i + 1]; k++)
            check_image(f, i, p->image[k]);
    return f;
}

void prompt_images_close(PromptImages *f)
{
    features_close(f);
}

bool prompt_images_rows(const void **row, const PromptImages *f, const Prompts *p, int i, int image_id)
{
    const int *token = p->token + p->start[i];
    size_t k = 0;
    for (int t = 0; t < prompts_length(p, i); t++) {
        row[t] = NULL;
        if (token[t] == image_id && f) {
            row[t] = features_at(f, p->image[p->first_image[i] + k / (size_t)f->rows], (int)(k % (size_t)f->rows));
            k++;
        }
    }
    return f && f->f32;
}
