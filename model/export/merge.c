/* Works on a block of columns at a time: this part of A stays in the caches for all rows. The width
 * of a block is a constant, so that the compiler vectorizes the inner loop. 7B parameters with rank
 * 16 take about 20 seconds on one core. */
#include "model/export/merge.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"

enum { BLOCK = 512, TERMS = 4 }; /* columns of a block; products that are added in one pass */

Merge merge_open(const float *a, const float *b, int rank, size_t rows, size_t cols, float scale)
{
    const size_t stride = (cols + BLOCK - 1) / BLOCK * BLOCK;
    const int most = (rank + TERMS - 1) / TERMS * TERMS;
    Merge m = { .a = xcalloc((size_t)most * stride, sizeof *a),
                .b = xcalloc(rows * (size_t)most, sizeof *b),
                .rank = most,
                .cols = cols,
                .stride = stride,
                .scale = scale };
    for (int j = 0; j < rank; j++)
        memcpy(m.a + (size_t)j * stride, a + (size_t)j * cols, cols * sizeof *a);
    for (size_t i = 0; i < rows; i++)
        memcpy(m.b + i * (size_t)most, b + i * (size_t)rank, (size_t)rank * sizeof *b);
    return m;
}

void merge_close(Merge *m)
{
    free(m->a);
    free(m->b);
}

/* Sets `sum` to row `b` of B times BLOCK columns of A. */
static void multiply(float *restrict sum, const float *restrict b, const float *restrict a,
                     int rank, size_t stride)
{
    memset(sum, 0, BLOCK * sizeof *sum);
    for (int j = 0; j < rank; j += TERMS, a += TERMS * stride)
        for (int c = 0; c < BLOCK; c++)
            sum[c] = sum[c] + b[j] * a[c] + b[j + 1] * a[stride + c] +
                     b[j + 2] * a[2 * stride + c] + b[j + 3] * a[3 * stride + c];
}

void merge_add(float *y, const Merge *m, size_t first, size_t n)
{
    const size_t end = first + n;
    float sum[BLOCK];
    for (size_t at = 0; at < m->stride; at += BLOCK)
        for (size_t row = first / m->cols; row * m->cols < end; row++) {
            const size_t start = row * m->cols, last = at + BLOCK < m->cols ? at + BLOCK : m->cols;
            const size_t from = start + at > first ? start + at : first,
                         to = start + last < end ? start + last : end;
            if (from >= to)
                continue;
            multiply(sum, m->b + row * (size_t)m->rank, m->a + at, m->rank, m->stride);
            for (size_t i = from; i < to; i++)
                y[i - first] += m->scale * sum[i - start - at];
        }
}
