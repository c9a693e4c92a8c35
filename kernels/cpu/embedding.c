/* Forward and backward of the embedding table.
 *
 *     y[n] = w[token n]        dw[v] += sum over the n with token n = v of dy[n] */
#include <string.h>

#include "kernels/cpu/cpu.h"

static void check_token(int token, Tensor w)
{
    CHECK(token >= 0 && token < w.rows, "embedding: token %d; the table has %d rows", token,
          w.rows);
}

void backend_embedding_forward(Tensor y, const TokenAt *sorted, Tensor w)
{
    CHECK_TENSOR(w, w.rows, w.cols);
    CHECK_TENSOR(y, y.rows, w.cols);
    const size_t C = (size_t)w.cols;
    float *values = tensor_result(y, 0);
    for (int n = 0; n < y.rows; n++) {
        check_token(sorted[n].token, w);
        tensor_load(values + (size_t)sorted[n].position * C, w, (size_t)sorted[n].token * C, C);
    }
    tensor_finish(y, values);
}

/* Each row of dw is read once, gets the sum in F32 over all tokens with this row, and is written
 * once. So a BF16 dw is rounded once. An empty dw is zeroed first, because most rows have no
 * token. */
void backend_embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy)
{
    CHECK_TENSOR(dw, dw.rows, dw.cols);
    CHECK_TENSOR(dy, dy.rows, dw.cols);
    CHECK_PLAIN(dw);
    const int N = dy.rows;
    const size_t C = (size_t)dw.cols;
    const float *gradient = tensor_values(dy, 0);
    float *row = cpu_scratch(1, C);
    if (dw.empty)
        memset(dw.data, 0, tensor_bytes(dw));
    for (int i = 0; i < N;) {
        const int token = sorted[i].token;
        check_token(token, dw);
        tensor_load(row, dw, (size_t)token * C, C);
        for (; i < N && sorted[i].token == token; i++)
            for (size_t c = 0; c < C; c++)
                row[c] += gradient[(size_t)sorted[i].position * C + c];
        tensor_store(dw, (size_t)token * C, row, C);
    }
}
