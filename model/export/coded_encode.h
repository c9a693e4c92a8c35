/* Encodes a matrix as described in coded.h, piece by piece. */
#pragma once
#include <stdint.h>

#include "model/checkpoint/coded.h"

/* Statistics of a whole matrix that some encodings need first; if coded_shares, of all matrices
 * with the same scale. */
typedef struct {
    float amax;
    double sum[256]; /* NF4: of the largest magnitudes of blocks i, 256 + i, ... */
    size_t blocks;
} CodedView;

bool coded_looks_first(Coded c);
/* Whether q, k and v share a scale, and gate and up share another. */
bool coded_shares(Coded c);
/* Adds the next n elements to the statistics: whole units, or the last elements. */
void coded_look(CodedView *v, Coded c, const float *w, size_t n);

/* out[i]: the bytes of tensor i for the next n elements w: whole units, or the last. May change w.
 * Uses several threads. */
void coded_encode(void *const out[CODED_TENSORS], Coded c, const CodedView *v, float *w,
                  size_t cols, size_t n);

/* The scales of a matrix in int4, (rows, cols / group), for which codes are chosen later. Uses
 * several threads. */
void coded_int4_scales(float *scale, Coded c, const float *w, size_t rows, size_t cols);

/* coded_encode for int4 with given codes (n, from -8 to 7) and scales (BF16 values). */
void coded_int4(void *const out[CODED_TENSORS], Coded c, const int8_t *codes, const float *scale,
                size_t n);

/* The content, `bytes` bytes, of the tensor with per 0 and that suffix. */
void coded_whole(void *to, size_t bytes, const char *suffix, Coded c, const CodedView *v,
                 size_t rows, size_t cols);
