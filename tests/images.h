/* Small models with images, and features that depend only on a seed. */
#pragma once
#include "tests/models.h"

enum { IMAGE_TOKEN = 77, IMAGE_ROWS = 4, FEATURE_SIZE = 24, MOST_PLACES = 256 };

static inline ModelConfig with_images(ModelConfig m, Projector projector, bool bias)
{
    m.image = (ImageConfig){ IMAGE_TOKEN, IMAGE_ROWS, FEATURE_SIZE, projector, bias };
    return m;
}

/* Images in a batch. row[i]: the features that token i of the batch shows; NULL: the token shows no
 * image. */
typedef struct {
    const void *row[MOST_PLACES];
    float values[MOST_PLACES][FEATURE_SIZE];
    int count;
} TestImages;

/* Puts an image at positions 2 .. 5 of every second sequence of T tokens, and a second image into
 * the first sequence. The tokens at these positions become IMAGE_TOKEN, and are not targets. */
static inline void place_images(TestImages *p, int *tokens, int *targets, int sequences, int T,
                                uint64_t seed)
{
    *p = (TestImages){ 0 };
    for (int n = 0; n < sequences * T; n++) {
        const int b = n / T, t = n % T;
        if (b % 2 != 0 || t < 2 || t >= (b == 0 ? 2 : 1) * IMAGE_ROWS + 2)
            continue;
        for (int c = 0; c < FEATURE_SIZE; c++)
            p->values[n][c] = 2 * test_uniform(seed, (uint64_t)(n * FEATURE_SIZE + c));
        p->row[n] = p->values[n];
        p->count++;
        tokens[n] = IMAGE_TOKEN;
        targets[n - 1] = -1;
    }
}

static inline ImageRows image_rows(const TestImages *p)
{
    return (ImageRows){ p->row, F32 };
}
