/* Adds the product of an adapter's two matrices to a matrix of the base. */
#pragma once
#include <stddef.h>

typedef struct {
    float *a, *b; /* (rank, stride) and (rows, rank), padded with 0 */
    int rank;
    size_t cols, stride;
    float scale;
} Merge;

/* Copies A (rank, cols) and B (rows, rank) to `m`. */
Merge merge_open(const float *a, const float *b, int rank, size_t rows, size_t cols, float scale);
void merge_close(Merge *m);

/* y = y + scale * (B A), for n elements from `first` on, row-major. Sums over the rank are computed
 * in F32, in order. */
void merge_add(float *y, const Merge *m, size_t first, size_t n);
