/* The product of an adapter's two matrices, added to the matrix that they stand beside. */
#pragma once
#include <stddef.h>

typedef struct {
    float *a, *b;           /* (rank, stride) and (rows, rank), filled up with 0 */
    int    rank;
    size_t cols, stride;
    float  scale;
} Merge;

/* Copies A (rank, cols) and B (rows, rank). */
Merge merge_open (const float *a, const float *b, int rank, size_t rows, size_t cols, float scale);
void  merge_close(Merge *m);

/* y = y + scale * (B A), of whose elements, row behind row, y has n from `first` on. Sums are in F32, in the order of the rank. */
void  merge_add  (float *y, const Merge *m, size_t first, size_t n);
