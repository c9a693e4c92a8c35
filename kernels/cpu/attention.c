/* Causal softmax attention, head by head and document by document, through GEMMs on blocks of query
 * rows.
 *
 *     s_tu = scale q_t.k_u (u <= t)   lse_t = log sum_u exp(s_tu)   p_tu = exp(s_tu - lse_t)   y_t = sum_u p_tu v_u
 *
 * With a window, u must also satisfy t - window < u [Beltagy 2020, Longformer, sec. 3.1]. A block
 * of rows skips the keys before the window of its first row.
 *
 * Backward, from dy: dv_u = sum_t p_tu dy_t. dp_tu = dy_t.v_u. The softmax's Jacobian gives
 *     ds_tu = p_tu (dp_tu - sum_w p_tw dp_tw) = p_tu (dp_tu - delta_t), delta_t = dy_t . y_t,
 * since sum_w p_tw dy_t.v_w = dy_t.y_t. Then dq_t = scale sum_u ds_tu k_u and dk_u = scale sum_t
 * ds_tu q_t. [Dao 2023, FlashAttention-2, sec. 2.3]. The dk and dv of a key/value head are sums
 * over its H/K query heads. */
#include <cblas.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { BLOCK = 128 }; /* query rows per block; a block's scores are (BLOCK, keys) */

/* The rows of one head in one document. Consecutive rows are `ld` elements apart. */
typedef struct {
    const float *q, *k, *v; /* (length, D) */
    float *dq, *dk, *dv;
    int length, D, ld, window; /* window is `length` if attention has no window */
    float scale;
} Head;

static bool is_left_out(int i, Documents docs)
{
    return docs.left_out && docs.left_out[i];
}

static void check_documents(const char *op, Attention a, Documents docs)
{
    if (!docs.count)
        return;
    CHECK(docs.start[0] == 0 && docs.start[docs.count] == a.B * a.T,
          "%s: documents cover tokens %d to %d; expected all %d tokens", op, docs.start[0],
          docs.start[docs.count], a.B * a.T);
    for (int i = 0; i < docs.count; i++) {
        int first = docs.start[i], last = docs.start[i + 1] - 1;
        CHECK(first <= last && first / a.T == last / a.T &&
                  (is_left_out(i, docs) || last - first < docs.longest),
              "%s: document %d is tokens %d to %d of sequences of %d, the longest %d", op, i, first,
              last, a.T, docs.longest);
    }
}

static int document_count(Attention a, Documents docs)
{
    return docs.count ? docs.count : a.B;
}

static int document_start(int i, Attention a, Documents docs)
{
    return docs.count ? docs.start[i] : i * a.T;
}

/* Stores rows first .. first + rows - 1 of `values` in t. `values` is the result of tensor_result;
 * if it is t's own memory, nothing has to be stored. */
static void finish_rows(Tensor t, const float *values, int first, int rows)
{
    const size_t at = (size_t)first * (size_t)t.cols;
    if (values != t.data)
        tensor_store(t, at, values + at, (size_t)rows * (size_t)t.cols);
}

/* Index in lse (B, H, T) of token `first` of head h. The shape is the same with documents. */
static size_t lse_at(int first, int h, Attention a)
{
    return ((size_t)(first / a.T) * (size_t)a.H + (size_t)h) * (size_t)a.T + (size_t)(first % a.T);
}

static Head head_at(const float *qkv, float *dqkv, int first, int length, int h, Attention a)
{
    const int kv = h / (a.H / a.K), ld = (a.H + 2 * a.K) * a.D;
    const size_t row = (size_t)first * (size_t)ld;
    const size_t q = row + (size_t)(h * a.D), k = row + (size_t)((a.H + kv) * a.D);
    const size_t v = k + (size_t)(a.K * a.D);
    Head head = { .q = qkv + q,
                  .k = qkv + k,
                  .v = qkv + v,
                  .length = length,
                  .D = a.D,
                  .ld = ld,
                  .scale = a.scale,
                  .window = a.window ? a.window : length };
    if (dqkv) {
        head.dq = dqkv + q;
        head.dk = dqkv + k;
        head.dv = dqkv + v;
    }
    return head;
}

/* The first key that query row t sees. */
static int first_key(Head x, int t)
{
    return t < x.window ? 0 : t - x.window + 1;
}

/* s (rows, keys) = factor * x (rows, D) m (keys, D)^T */
static void products(float *s, int rows, int keys, float factor, const float *x, int ldx,
                     const float *m, int ldm, int D)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, D, factor, x, ldx, m, ldm, 0,
                s, keys);
}

/* x (keys, D) += factor * s (rows, keys)^T m (rows, D) */
static void add_columns(float *x, int ldx, int rows, int keys, float factor, const float *s,
                        const float *m, int ldm, int D)
{
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, D, rows, factor, s, keys, m, ldm, 1,
                x, ldx);
}

/* x (rows, D) = factor * s (rows, keys) m (keys, D) */
static void weighted_sum(float *x, int ldx, int rows, int keys, float factor, const float *s,
                         const float *m, int ldm, int D)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, D, keys, factor, s, keys, m, ldm,
                0, x, ldx);
}

float attention_softmax(float *s, int begin, int last, int keys)
{
    float max = -INFINITY;
    double total = 0;
    for (int u = begin; u <= last; u++)
        max = s[u] > max ? s[u] : max;
    for (int u = begin; u <= last; u++) {
        s[u] = expf(s[u] - max);
        total += s[u];
    }
    const float factor = (float)(1 / total);
    for (int u = begin; u <= last; u++)
        s[u] *= factor;
    for (int u = 0; u < begin; u++)
        s[u] = 0;
    for (int u = last + 1; u < keys; u++)
        s[u] = 0;
    return (float)(max + log(total));
}

static void head_forward(float *y, int ldy, float *lse, Head x)
{
    for (int first = 0; first < x.length; first += BLOCK) {
        const int rows = x.length - first < BLOCK ? x.length - first : BLOCK;
        const int from = first_key(x, first), keys = first + rows - from;
        const size_t skip = (size_t)from * (size_t)x.ld;
        float *s = cpu_scratch(2, (size_t)BLOCK * (size_t)keys);
        products(s, rows, keys, x.scale, x.q + (size_t)first * (size_t)x.ld, x.ld, x.k + skip, x.ld,
                 x.D);
        for (int i = 0; i < rows; i++)
            lse[first + i] =
                attention_softmax(s + (size_t)i * (size_t)keys, first_key(x, first + i) - from,
                                  first + i - from, keys);
        weighted_sum(y + (size_t)first * (size_t)ldy, ldy, rows, keys, 1, s, x.v + skip, x.ld, x.D);
    }
}

void backend_attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    check_attention(OPERATION, y, qkv, a, docs);
    check_documents(OPERATION, a, docs);
    const float *input = tensor_values(qkv, 0);
    float *output = tensor_result(y, 1);
    for (int i = 0; i < document_count(a, docs); i++) {
        const int first = document_start(i, a, docs),
                  length = document_start(i + 1, a, docs) - first;
        if (is_left_out(i, docs))
            continue;
        for (int h = 0; h < a.H; h++)
            head_forward(output + (size_t)first * (size_t)y.cols + h * a.D, y.cols,
                         lse + lse_at(first, h, a), head_at(input, NULL, first, length, h, a));
        finish_rows(y, output, first, length);
    }
}

static double dot(const float *a, const float *b, int n)
{
    double total = 0;
    for (int i = 0; i < n; i++)
        total += (double)a[i] * b[i];
    return total;
}

/* Backward of query rows `first` to first + rows - 1. y and dy are these rows' output and gradient.
 * p and ds are scratch memory for (rows, keys). */
static void rows_backward(Head x, const float *dy, const float *y, int ldy, const float *lse,
                          int first, int rows, float *p, float *ds)
{
    const int from = first_key(x, first), keys = first + rows - from;
    const float *q = x.q + (size_t)first * (size_t)x.ld;
    const size_t skip = (size_t)from * (size_t)x.ld;
    products(p, rows, keys, x.scale, q, x.ld, x.k + skip, x.ld, x.D);
    products(ds, rows, keys, 1, dy, ldy, x.v + skip, x.ld, x.D);
    for (int i = 0; i < rows; i++) {
        float *pi = p + (size_t)i * (size_t)keys, *di = ds + (size_t)i * (size_t)keys;
        const float delta =
            (float)dot(dy + (size_t)i * (size_t)ldy, y + (size_t)i * (size_t)ldy, x.D);
        const int begin = first_key(x, first + i) - from, last = first + i - from;
        for (int u = 0; u < keys; u++) {
            pi[u] = u >= begin && u <= last ? expf(pi[u] - lse[i]) : 0;
            di[u] = pi[u] * (di[u] - delta);
        }
    }
    weighted_sum(x.dq + (size_t)first * (size_t)x.ld, x.ld, rows, keys, x.scale, ds, x.k + skip,
                 x.ld, x.D);
    add_columns(x.dk + skip, x.ld, rows, keys, x.scale, ds, q, x.ld, x.D);
    add_columns(x.dv + skip, x.ld, rows, keys, 1, p, dy, ldy, x.D);
}

void backend_attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                                Attention a, Documents docs)
{
    check_attention(OPERATION, y, qkv, a, docs);
    check_documents(OPERATION, a, docs);
    CHECK_TENSOR(dy, y.rows, y.cols);
    CHECK_TENSOR(dqkv, qkv.rows, qkv.cols);
    CHECK(dqkv.data != qkv.data && dqkv.data != dy.data,
          "attention_backward: dqkv has the memory of an input");
    const float *input = tensor_values(qkv, 0), *out = tensor_values(y, 1),
                *gradient = tensor_values(dy, 2);
    float *output = tensor_result(dqkv, 3);
    for (int i = 0; i < document_count(a, docs); i++) {
        const int start = document_start(i, a, docs),
                  length = document_start(i + 1, a, docs) - start;
        if (is_left_out(i, docs))
            continue;
        memset(output + (size_t)start * (size_t)dqkv.cols, 0,
               (size_t)length * (size_t)dqkv.cols * sizeof *output);
        float *p = cpu_scratch(4, (size_t)BLOCK * (size_t)length),
              *ds = cpu_scratch(5, (size_t)BLOCK * (size_t)length);
        for (int h = 0; h < a.H; h++) {
            const Head x = head_at(input, output, start, length, h, a);
            for (int first = 0; first < length; first += BLOCK) {
                const size_t at = (size_t)(start + first) * (size_t)y.cols + (size_t)(h * a.D);
                rows_backward(x, gradient + at, out + at, y.cols, lse + lse_at(start, h, a) + first,
                              first, length - first < BLOCK ? length - first : BLOCK, p, ds);
            }
        }
        finish_rows(dqkv, output, start, length);
    }
}
