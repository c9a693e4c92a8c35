/* Prompts for a model, as tokens. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int     count;
    size_t *start;             /* [count + 1]: prompt i is token[start[i]] .. token[start[i + 1] - 1] */
    int    *token;
    size_t *first_image;       /* [count + 1]: prompt i shows image[first_image[i]] .. image[first_image[i + 1] - 1] */
    uint32_t *image;           /* numbers among the features */
} Prompts;

/* What a prompt may have: ids below `vocab`, at most `most` tokens. image_rows: tokens image_id for each image, 0: a model of text
 * only. features: there are features of images. */
typedef struct { int vocab, most, image_id, image_rows; bool features; } PromptLimits;

/* Reads a file with one prompt per line: a JSON object with "tokens", a list of ids, and "images", the numbers of the images that it
 * shows, if any (other keys are ignored), or only the list of ids; empty lines are ignored. Dies on any other line, an id that is not
 * in [0, vocab), a prompt without tokens or with more than `most`, image tokens that are not image_rows for each image, images without
 * features, or a file without prompts. */
void prompts_read(Prompts *p, const char *path, const PromptLimits *limits);
void prompts_free(Prompts *p);

/* Tokens of prompt i, and of the longest. */
int  prompts_length (const Prompts *p, int i);
int  prompts_longest(const Prompts *p);
