/* The encoding of a matrix as coded.h describes it, piece by piece. */
#pragma once
#include <stdint.h>

#include "model/checkpoint/coded.h"

/* What has to be known of whole matrices before: of all with the same scale where coded_shares, else of each. */
typedef struct {
    float  amax;
    double sum[256];            /* of the largest magnitudes of blocks i, 256 + i, ..., of NF4 */
    size_t blocks;
} CodedView;

bool coded_looks_first(Coded c);
bool coded_shares(Coded c);                     /* q, k and v have one scale, gate and up have one */
void coded_look(CodedView *v, Coded c, const float *w, size_t n);       /* the next n elements: whole units, or the last */

/* out[i]: what tensor i holds of the next n elements w: whole units, or the last. w may be changed. By several threads. */
void coded_encode(void *const out[CODED_TENSORS], Coded c, const CodedView *v, float *w, size_t cols, size_t n);

/* The scales of a matrix in int4 (rows, cols / group), which the codes are to be chosen for. By several threads. */
void coded_int4_scales(float *scale, Coded c, const float *w, size_t rows, size_t cols);

/* What coded_encode does, of int4 where n codes, from -8 to 7, and their scales, which have BF16 values, are there already. */
void coded_int4(void *const out[CODED_TENSORS], Coded c, const int8_t *codes, const float *scale, size_t n);

/* The tensor with per 0 and that suffix, which has so many bytes. */
void coded_whole(void *to, size_t bytes, const char *suffix, Coded c, const CodedView *v, size_t rows, size_t cols);
