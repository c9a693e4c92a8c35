/* Attention of a sequence's next tokens over a cache, head by head, through two GEMMs. The
 * equations are in attention.c. */
#include <cblas.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* Copies k or v of the new tokens to rows of the cache, which has the format of qkv. */
static void append(Tensor cache, int length, Tensor qkv, int column, Attention a)
{
    const size_t size = dtype_size(qkv.format.dtype), bytes = (size_t)cache.cols * size;
    for (int t = 0; t < a.T; t++) {
        const size_t from = (size_t)t * (size_t)qkv.cols + (size_t)column,
                     to = (size_t)(length + t) * (size_t)cache.cols;
        memcpy((char *)cache.data + to * size, (const char *)qkv.data + from * size, bytes);
    }
}

void backend_attention_cached(Tensor y, Tensor qkv, KvCache cache, Attention a)
{
    check_cached(OPERATION, y, qkv, cache, a);
    const int keys = cache.length + a.T, width = a.K * a.D;
    append(cache.k, cache.length, qkv, a.H * a.D, a);
    append(cache.v, cache.length, qkv, (a.H + a.K) * a.D, a);
    const float *q = tensor_values(qkv, 0), *k = tensor_values(tensor_rows(cache.k, 0, keys), 1);
    const float *v = tensor_values(tensor_rows(cache.v, 0, keys), 2);
    float *out = tensor_result(y, 3), *s = cpu_scratch(4, (size_t)a.T * (size_t)keys);
    for (int h = 0; h < a.H; h++) {
        const int kv = h / (a.H / a.K);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, a.T, keys, a.D, a.scale, q + h * a.D,
                    qkv.cols, k + kv * a.D, width, 0, s, keys);
        for (int t = 0; t < a.T; t++) {
            const int last = cache.length + t,
                      first = a.window && last >= a.window ? last - a.window + 1 : 0;
            attention_softmax(s + (size_t)t * (size_t)keys, first, last, keys);
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, a.T, a.D, keys, 1, s, keys,
                    v + kv * a.D, width, 0, out + h * a.D, y.cols);
    }
    tensor_finish(y, out);
}
