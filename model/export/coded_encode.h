/* Encodes a matrix in a format of coded.h, piece by piece. */
#pragma once
#include <stdint.h>

#include "model/checkpoint/coded.h"

/* Statistics that some encodings need before they encode: of a whole matrix or, if coded_shares, of
 * all matrices that share its scale. */
typedef struct {
    float amax;
    double sum[256]; /* NF4: sum of the largest magnitudes of blocks i, 256 + i, ... */
    size_t blocks;
} CodedView;

bool coded_looks_first(Coded c);
/* Whether q, k and v share a scale, and gate and up share another. */
bool coded_shares(Coded c);
/* Adds the next n elements to the statistics. n is a multiple of coded_unit, except at the end of
 * the matrix. */
void coded_look(CodedView *v, Coded c, const float *w, size_t n);

/* Encodes the next n elements w. out[i]: the bytes of tensor i for these elements. n is a multiple
 * of coded_unit, except at the end of the matrix. May change w. Uses several threads. */
void coded_encode(void *const out[CODED_TENSORS], Coded c, const CodedView *v, float *w,
                  size_t cols, size_t n);

/* Computes the scales (rows, cols / group) of a matrix in int4 whose codes are chosen later. Uses
 * several threads. */
void coded_int4_scales(float *scale, Coded c, const float *w, size_t rows, size_t cols);

/* As coded_encode, for int4 with given codes (n, from -8 to 7) and scales (BF16 values). */
void coded_int4(void *const out[CODED_TENSORS], Coded c, const int8_t *codes, const float *scale,
                size_t n);

/* Writes a tensor that is not encoded piece by piece (CodedTensor.per is 0). suffix names the
 * tensor; it has `bytes` bytes. */
void coded_whole(void *to, size_t bytes, const char *suffix, Coded c, const CodedView *v,
                 size_t rows, size_t cols);
