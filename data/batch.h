/* This rank's part of a training step. */
#pragma once
#include "data/mixture.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int sequences;
    int *tokens; /* (sequences, T) */
    /* (sequences, T): the next token; -1 at the last position and if the next token is masked */
    int *targets;
    uint8_t *begins; /* (sequences, T): 1 where a document begins */
    /* (sequences, T): pointer to the features of a token, in a mapped file; NULL: the token shows
     * no image. images NULL: the model reads only text */
    const void **images;
    /* (sequences, T): spec.value_bytes bytes for each target, its stored value; NULL: none */
    void *values;
    bool images_f32; /* the features are F32; false: BF16 */
    /* (sequences): the instance's number in its source; UINT32_MAX: the sequence is empty */
    uint32_t *index;
    uint8_t *source; /* (sequences): source of the mixture; 0 without a mixture */
    /* number of sequences of each source of the mixture in this step, over all ranks */
    uint32_t share[MIXTURE_MOST];
    long labels; /* number of this rank's targets >= 0 */
} Batch;

/* Allocates memory for this number of sequences of T tokens, and for their images and values. */
Batch batch_make(int sequences, int T, bool images, int value_bytes);
void batch_free(Batch *b);
