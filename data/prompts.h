/* Prompts for a model, as token ids. */
#pragma once
#include "data/shown_images.h"

typedef struct {
    int count;
    /* [count + 1]: prompt i is token[start[i]] .. token[start[i + 1] - 1] */
    size_t *start;
    int *token;
    /* [count + 1]: prompt i shows image[first_image[i]] .. image[first_image[i + 1] - 1] */
    size_t *first_image;
    uint32_t *image; /* index of each shown image in the folder of features */
} Prompts;

/* Reads a file with one prompt per line; empty lines are ignored. A prompt is a list of token ids,
 * or a JSON object with "tokens", this list, and possibly "images", the indexes of the images that
 * the prompt shows (other keys are ignored). Dies on any other line, an id outside [0, vocab), a
 * prompt without tokens or with more than `most`, images that the tokens do not show or that have
 * no features, or a file without prompts. */
void prompts_read(Prompts *p, const char *path, const TokenLimits *limits);
void prompts_free(Prompts *p);

/* Number of tokens of prompt i, and of the longest prompt. */
int prompts_length(const Prompts *p, int i);
int prompts_longest(const Prompts *p);
