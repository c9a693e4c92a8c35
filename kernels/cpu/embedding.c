/* Rows of the embedding table.
 *
 *     y[n] = w[token n]        dw[v] += sum over the n with token n = v of dy[n] */
#include <string.h>

#include "kernels/cpu/cpu.h"

static void check_token(int token, int n, int V)
{
    CHECK(token >= 0 && token < V, "embedding: token %d at %d; the table has %d rows", token, n, V);
}

void embedding_forward(Tensor y, const int *tokens, Tensor w)
{
    CHECK_TENSOR(w, w.rows, w.cols);
    CHECK_TENSOR(y, y.rows, w.cols);
    const size_t C = (size_t)w.cols;
    float *values = tensor_result(y, 0);
    for (int n = 0; n < y.rows; n++) {
        check_token(tokens[n], n, w.rows);
        load(values + (size_t)n * C, w, (size_t)tokens[n] * C, C);
    }
    tensor_finish(y, values);
}

/* order: positions sorted by token, equal tokens in the order of n (a counting sort). end[v]: behind those of v. */
static void sort_by_token(int *order, int *end, const int *tokens, int N, int V)
{
    memset(end, 0, sizeof *end * (size_t)V);
    for (int n = 0; n < N; n++) {
        check_token(tokens[n], n, V);
        end[tokens[n]]++;
    }
    for (int v = 0, at = 0; v < V; v++) {
        int count = end[v];
        end[v] = at;
        at += count;
    }
    for (int n = 0; n < N; n++)
        order[end[tokens[n]]++] = n;
}

/* A row is read, summed in F32 over all its tokens and written once, so that a BF16 dw is rounded once. */
void embedding_backward(Tensor dw, const int *tokens, Tensor dy)
{
    CHECK_TENSOR(dw, dw.rows, dw.cols);
    CHECK_TENSOR(dy, dy.rows, dw.cols);
    CHECK_PLAIN(dw);
    const int N = dy.rows, V = dw.rows;
    const size_t C = (size_t)dw.cols;
    int *order = (int *)scratch(0, (size_t)N), *end = (int *)scratch(1, (size_t)V);
    const float *gradient = tensor_values(dy, 2);
    float *row = scratch(3, C);
    sort_by_token(order, end, tokens, N, V);
    for (int v = 0, i = 0; v < V; v++) {
        if (i == end[v])
            continue;
        load(row, dw, (size_t)v * C, C);
        for (; i < end[v]; i++)
            for (size_t c = 0; c < C; c++)
                row[c] += gradient[(size_t)order[i] * C + c];
        store(dw, (size_t)v * C, row, C);
    }
}
