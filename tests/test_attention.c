/* Compares causal attention with a double reference. A comment derives each bound. Notation and
 * assumptions are those of test_kernels.c. */
#include "tests/test.h"
#include "tests/heads.h"

#include <limits.h>

// clang-format off
static const Shape shapes[] = {
    { "one",   1, 1,   1, 1, 2,   false, true },
    { "odd",   2, 7,   3, 1, 6,   false, true },
    { "docs",  2, 7,   4, 2, 6,   true,  true },
    { "d64",   2, 48,  4, 2, 64,  false, false },
    { "d64-docs", 2, 48, 4, 2, 64, true, false },
    { "d128",  1, 136, 2, 1, 128, false, false },
    { "d128-docs", 1, 136, 2, 2, 128, true, false },
};
// clang-format on
/* Attention with windows that end inside and on the edge of tiles: 32 keys, 128 rows. */
// clang-format off
static const Shape windows[] = {
    { "one-window",  1, 1,   1, 1, 2,   false, true,  1 },
    { "odd-window",  2, 7,   3, 1, 6,   false, true,  3 },
    { "docs-window", 2, 7,   4, 2, 6,   true,  true,  2 },
    { "window1",     2, 48,  4, 2, 64,  false, false, 1 },
    { "window33",    1, 300, 4, 2, 64,  false, false, 33 },
    { "window128",   1, 270, 2, 1, 64,  false, false, 128 },
    { "window200",   1, 300, 2, 2, 128, false, false, 200 },
    { "docs-window5", 2, 48, 4, 2, 64,  true,  false, 5 },
    { "docs-window100", 1, 700, 2, 1, 64, true, false, 100 },
};
// clang-format on
enum { SHAPES = sizeof shapes / sizeof shapes[0], WINDOWS = sizeof windows / sizeof windows[0] };

static void for_all(const Shape *of, int count, void (*test)(const FormatRow *, const Shape *))
{
    for (int f = 0; f < FORMAT_ROWS; f++)
        for (int s = 0; s < count; s++)
            if (on_cpu() || !of[s].odd) {
                test(&format_rows[f], &of[s]);
                release();
            }
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Documents of 1, 2, 4, ... tokens, up to the end of each sequence. */
static Documents documents_of(const Shape *s)
{
    Documents d = { 0 };
    if (!s->documents)
        return d;
    int *start = keep(sizeof *start * (size_t)(s->B * s->T + 1));
    for (int b = 0; b < s->B; b++)
        for (int t = 0, length = 1; t < s->T; length *= 2) {
            int n = length < s->T - t ? length : s->T - t;
            start[d.count++] = b * s->T + t;
            d.longest = n > d.longest ? n : d.longest;
            t += n;
        }
    start[d.count] = s->B * s->T;
    d.host_start = start;
    d.start = put_ints(start, (size_t)d.count + 1);
    return d;
}

/* Returns the first token of token n's document. */
static int document_begin(const Shape *s, int n)
{
    int first = n / s->T * s->T;
    if (!s->documents)
        return first;
    for (int length = 1; first + length <= n; length *= 2)
        first += length;
    return first;
}

/* Returns the first token that token n attends to. */
static int first_seen(const Shape *s, int n)
{
    const int first = document_begin(s, n), nearest = n - s->window + 1;
    return s->window && nearest > first ? nearest : first;
}

/* A query row of a head: errors of scores, probabilities, output, and error bounds of an
 * implementation.
 * score:  a dot product of D terms: 2 (D+2) u sum|q||k| scale, and exp's argument is rounded:
 *         es = max of that + u (|s|+|max|)
 * p:      relatively ep = 2 es + (keys + 12) u, more if an operand format rounds it for the next GEMM (uP)
 * y:      sum p |v| (ep + uP + 2 (keys + 2) u)          lse: es + (keys + 12) u + 2 u |lse| */
typedef struct {
    int first, keys;
    double *p, ep, lse, lse_error;
} Row;

static Row softmax_row(const double *qkv, const Shape *s, int n, int h, double scale)
{
    const int kv = h / (s->H / s->K), S = (s->H + 2 * s->K) * s->D, D = s->D;
    Row r = { .first = first_seen(s, n) };
    r.keys = n + 1 - r.first;
    r.p = doubles((size_t)r.keys);
    const double *q = qkv + n * S + h * D;
    double max = -INFINITY, min = INFINITY, es = 0, total = 0;
    for (int u = 0; u < r.keys; u++) {
        const double *k = qkv + (r.first + u) * S + (s->H + kv) * D;
        double size = 0;
        for (int i = 0; i < D; i++)
            r.p[u] += scale * q[i] * k[i], size += scale * fabs(q[i] * k[i]);
        max = fmax(max, r.p[u]), min = fmin(min, r.p[u]);
        es = fmax(es, 2 * (D + 2) * U24 * size);
    }
    es += U24 * 2 * fmax(fabs(max), fabs(min));
    for (int u = 0; u < r.keys; u++)
        total += exp(r.p[u] - max);
    r.lse = max + log(total);
    for (int u = 0; u < r.keys; u++)
        r.p[u] = exp(r.p[u] - r.lse);
    r.ep = 2 * es + (r.keys + 12) * U24;
    r.lse_error = es + (r.keys + 12) * U24 + 2 * U24 * fabs(r.lse);
    return r;
}

static void forward_row(double *y, double *bound, const Row *r, const double *qkv, const Shape *s,
                        int h, double uP)
{
    const int kv = h / (s->H / s->K), S = (s->H + 2 * s->K) * s->D, D = s->D;
    for (int i = 0; i < D; i++) {
        double size = 0;
        for (int u = 0; u < r->keys; u++) {
            double v = qkv[(r->first + u) * S + (s->H + s->K + kv) * D + i];
            y[i] += r->p[u] * v, size += r->p[u] * fabs(v);
        }
        bound[i] = size * (r->ep + uP + 2 * (r->keys + 2) * U24);
    }
}

/* Adds row n's part to dq, dk, dv (G) and to their error bounds (E). dp = dy.v, delta = dy.y, ds =
 * p (dp - delta). Errors: p recomputed from lse ep + lse_error; dp 2 (D+2) u sum|dy||v|; delta that
 * of y, as rounded by the back end (ey), and (D+2) u; ds may be rounded for the next GEMM (uP);
 * sums of up to T H/K terms 2 (T H/K + 2) u. uP twice: a back end may round dk and dv of each query
 * head before it adds the heads. */
static void backward_row(double *G, double *E, const Row *r, const double *qkv, const double *dy,
                         const double *y, const double *ey, const Shape *s, int n, int h,
                         double scale, double uP)
{
    const int kv = h / (s->H / s->K), S = (s->H + 2 * s->K) * s->D, D = s->D, q = n * S + h * D;
    const double terms = 2 * (s->T * s->H / s->K + 2) * U24;
    double delta = 0, e_delta = 0;
    for (int i = 0; i < D; i++) {
        delta += dy[i] * y[i];
        e_delta += fabs(dy[i]) * ey[i] + (D + 2) * U24 * fabs(dy[i] * y[i]);
    }
    for (int u = 0; u < r->keys; u++) {
        const int k = (r->first + u) * S + (s->H + kv) * D, v = k + s->K * D;
        double dp = 0, e_dp = 0, p = r->p[u], ep = r->ep + r->lse_error + uP;
        for (int i = 0; i < D; i++)
            dp += dy[i] * qkv[v + i], e_dp += 2 * (D + 2) * U24 * fabs(dy[i] * qkv[v + i]);
        double ds = p * (dp - delta),
               e = p * (e_dp + e_delta + 2 * U24 * (fabs(dp) + fabs(delta))) + fabs(ds) * ep;
        for (int i = 0; i < D; i++) {
            G[q + i] += scale * ds * qkv[k + i];
            E[q + i] += scale * fabs(qkv[k + i]) * (e + (terms + uP) * fabs(ds));
            G[k + i] += scale * ds * qkv[q + i];
            E[k + i] += scale * fabs(qkv[q + i]) * (e + (terms + uP) * fabs(ds));
            G[v + i] += p * dy[i];
            E[v + i] += fabs(dy[i]) * p * (ep + terms + uP);
        }
    }
}

static void attention_case(const FormatRow *f, const Shape *s)
{
    Attention a = attention_of(s);
    Documents docs = documents_of(s);
    const int N = s->B * s->T, S = (s->H + 2 * s->K) * s->D, O = s->H * s->D;
    const double u = f->act.dtype == F32 ? 0 : unit_roundoff(f->act);
    Tensor qkv = make_filled(f->act, N, S, 1, -2, 2), y = make(f->act, N, O),
           lse = make_f32(N, s->H);
    Tensor dy = make_filled(f->act, N, O, 2, -1, 1), dqkv = make(f->act, N, S);
    double *X = values(qkv), *DY = values(dy), *ref = doubles((size_t)(N * O)),
           *bound = doubles((size_t)(N * O));
    double *G = doubles((size_t)(N * S)), *E = doubles((size_t)(N * S));
    double *L = doubles((size_t)(N * s->H)), *el = doubles((size_t)(N * s->H)),
           *ey = doubles((size_t)s->D);

    TWICE(attention_forward(y, lse.data, qkv, a, docs), y, lse);
    TWICE(attention_backward(dqkv, dy, qkv, y, lse.data, a, docs), dqkv);
    for (int n = 0; n < N; n++)
        for (int h = 0; h < s->H; h++) {
            const int at = n * O + h * s->D;
            Row r = softmax_row(X, s, n, h, a.scale);
            forward_row(ref + at, bound + at, &r, X, s, h, u);
            for (int i = 0; i < s->D; i++)
                ey[i] = bound[at + i] + unit_roundoff(f->act) * fabs(ref[at + i]);
            backward_row(G, E, &r, X, DY + at, ref + at, ey, s, n, h, a.scale, u);
            int place = (n / s->T * s->H + h) * s->T + n % s->T;
            L[place] = r.lse, el[place] = r.lse_error;
        }
    check("attention_forward", f, s, y, ref, bound);
    if (!s->documents) /* with documents, the layout of lse depends on the back end */
        check("attention_lse", f, s, lse, L, el);
    check("attention_backward", f, s, dqkv, G, E);
}

TEST(test_attention)
{
    for_all(shapes, SHAPES, attention_case);
}

TEST(test_windows)
{
    for_all(windows, WINDOWS, attention_case);
}

/* Computes tokens first .. first + count - 1 of a sequence with a cache of earlier tokens. The
 * cache has more room than needed. */
static void cached_piece(const FormatRow *f, const Shape *s, KvCache cache, Tensor all, int first,
                         int count)
{
    char piece[48];
    Attention a = attention_of(s);
    a.B = 1, a.T = count;
    const int O = s->H * s->D;
    const double u = f->act.dtype == F32 ? 0 : unit_roundoff(f->act), *X = values(all);
    Tensor y = make(f->act, count, O);
    double *ref = doubles((size_t)(count * O)), *bound = doubles((size_t)(count * O));
    cache.length = first;
    if (count > 500) { /* too many to check: this only fills the cache for later tokens */
        attention_cached(y, tensor_rows(all, first, count), cache, a);
        return;
    }
    TWICE(attention_cached(y, tensor_rows(all, first, count), cache, a), y, cache.k, cache.v);
    for (int n = 0; n < count; n++)
        for (int h = 0; h < s->H; h++) {
            Row r = softmax_row(X, s, first + n, h, a.scale);
            forward_row(ref + n * O + h * s->D, bound + n * O + h * s->D, &r, X, s, h, u);
        }
    snprintf(piece, sizeof piece, "attention_cached %d", first);
    check(piece, f, s, y, ref, bound);
}

static void cached_case(const FormatRow *f, const Shape *s)
{
    Shape one = *s;
    one.B = 1;
    const int T = s->T, width = s->K * s->D, some = T > 3 ? T - 3 : 1;
    Tensor all = make_filled(f->act, T, (s->H + 2 * s->K) * s->D, 1, -2, 2);
    const KvCache cache = { .k = make(f->act, T + 5, width), .v = make(f->act, T + 5, width) };
    if (f->grad.dtype != f->act.dtype) /* repeats the previous row */
        return;
    cached_piece(f, &one, cache, all, 0, some);
    for (int n = some; n < T; n += n == some ? 1 : T - some - 1)
        cached_piece(f, &one, cache, all, n, n == some ? 1 : T - some - 1);
}

/* One token and several tokens, after few keys, and after so many keys that a back end splits
 * them. */
TEST(test_cached)
{
    static const Shape more[] = {
        { "long", 1, 1500, 2, 1, 64, false, false },
        { "long-window", 1, 1500, 2, 2, 128, false, false, 700 },
        { "many-heads", 1, 100, 24, 4, 32, false, false },
        { "wide", 1, 140, 2, 1, 256, false, false },
    };
    static const Shape *const lists[] = { shapes, windows, more };
    const int counts[] = { SHAPES, WINDOWS, 4 };
    for (int l = 0; l < 3; l++)
        for (int i = 0; i < counts[l]; i++)
            for (int f = 0; f < FORMAT_ROWS && !lists[l][i].documents; f++) {
                cached_case(&format_rows[f], &lists[l][i]);
                release();
            }
}

/* Documents that are whole sequences give the same result as no documents. */
TEST(test_whole_documents)
{
    const Shape s = { "whole", 2, 48, 4, 2, 64, false, false };
    const Attention a = attention_of(&s);
    const Format f = { F32, 0 };
    const int start[] = { 0, s.T, 2 * s.T };
    const Documents docs = {
        .count = 2, .longest = s.T, .start = put_ints(start, 3), .host_start = start
    };
    Tensor qkv = make_filled(f, 96, 512, 1, -2, 2), y = make(f, 96, 256), z = make(f, 96, 256),
           lse = make_f32(96, 4);
    attention_forward(y, lse.data, qkv, a, (Documents){ 0 });
    attention_forward(z, lse.data, qkv, a, docs);
    const double *expected = values(y);
    double *bound = doubles(96 * 256);
    /* |v| <= 2; as above with |s| <= sqrt(64) 4 in the worst case */
    for (int i = 0; i < 96 * 256; i++)
        bound[i] = 2 * 2 * (4 * (64 + 2) * U24 * 32 + 128 * U24);
    check_close("whole documents", z, expected, bound);
    release();
}

/* A window that covers every key gives the same bits as no window. With documents, a window that
 * covers each document does so. */
static void wide_window(const FormatRow *f, const Shape *s)
{
    Attention a = attention_of(s);
    const Documents docs = documents_of(s);
    const int N = s->B * s->T, S = (s->H + 2 * s->K) * s->D, O = s->H * s->D;
    const int longest = s->documents ? docs.longest : s->T,
              wide[] = { longest, longest + 1, INT_MAX };
    Tensor qkv = make_filled(f->act, N, S, 1, -2, 2), dy = make_filled(f->act, N, O, 2, -1, 1);
    Tensor out[] = { make(f->act, N, O), make_f32(N, s->H), make(f->act, N, S) };
    void *none[3];
    for (int i = -1; i < 3; i++) {
        a.window = i < 0 ? 0 : wide[i];
        attention_forward(out[0], out[1].data, qkv, a, docs);
        attention_backward(out[2], dy, qkv, out[0], out[1].data, a, docs);
        if (i < 0)
            snapshot_all(none, out, 3);
        else
            check_twice(name("wide window", f, s), out, none, 3);
    }
}

TEST(test_wide_windows)
{
    for_all(shapes, SHAPES, wide_window);
}

static void fill_rows(Tensor t, RowRange r, float value)
{
    const size_t n = (size_t)r.count * (size_t)t.cols;
    const Tensor rows = tensor_rows(t, r.first, r.count), wide = make_f32(r.count, t.cols);
    float *host = keep(n * sizeof *host);
    for (size_t i = 0; i < n; i++)
        host[i] = value;
    device_put(wide.data, host, n * sizeof *host);
    quantize(rows, wide);
}

/* Every third document is skipped. Its rows of y and dqkv do not change, and all other rows have
 * the bits that they have if no document is skipped. */
static void left_out(const FormatRow *f, const Shape *s)
{
    enum { STAYS = 7 };
    const Attention a = attention_of(s);
    Documents docs = documents_of(s);
    const int N = s->B * s->T, S = (s->H + 2 * s->K) * s->D, O = s->H * s->D;
    const Tensor qkv = make_filled(f->act, N, S, 1, -2, 2),
                 dy = make_filled(f->act, N, O, 2, -1, 1), lse = make_f32(N, s->H);
    const Tensor y = make(f->act, N, O), dqkv = make(f->act, N, S);
    bool *out = keep(sizeof *out * (size_t)(docs.count + 1));
    for (int i = 0; i < docs.count; i++) {
        const RowRange rows = { docs.host_start[i], docs.host_start[i + 1] - docs.host_start[i] };
        out[i] = i % 3 == 1;
        if (!out[i])
            continue;
        fill_rows(qkv, rows, 0); /* finite, because a kernel may read a whole tile */
        fill_rows(dy, rows, 0);
    }
    attention_forward(y, lse.data, qkv, a, docs);
    attention_backward(dqkv, dy, qkv, y, lse.data, a, docs);
    const double *all[] = { values(y), values(dqkv) };
    fill_rows(y, (RowRange){ 0, N }, STAYS);
    fill_rows(dqkv, (RowRange){ 0, N }, STAYS);
    docs.left_out = out;
    attention_forward(y, lse.data, qkv, a, docs);
    attention_backward(dqkv, dy, qkv, y, lse.data, a, docs);
    const double *found[] = { values(y), values(dqkv) };
    for (int i = 0; i < docs.count; i++)
        for (int k = 0; k < 2; k++) {
            const int cols = k ? S : O;
            for (int j = docs.host_start[i] * cols; j < docs.host_start[i + 1] * cols; j++)
                if (found[k][j] != (out[i] ? STAYS : all[k][j]))
                    fail_msg("%s: %s[%d], document %d: %g, expected %g", name("left out", f, s),
                             k ? "dqkv" : "y", j, i, found[k][j], out[i] ? STAYS : all[k][j]);
        }
}

TEST(test_left_out)
{
    static const Shape packed[] = {
        { "docs", 2, 7, 4, 2, 6, true, true },
        { "d64-docs", 2, 48, 4, 2, 64, true, false },
        { "d128-docs", 1, 700, 4, 2, 128, true, false },
        { "d96-docs", 1, 300, 2, 2, 96, true, false, 20 },
    };
    for_all(packed, sizeof packed / sizeof *packed, left_out);
}

TEST(test_errors)
{
    const Shape s = { "errors", 2, 8, 4, 2, 64, false, false };
    Attention a = attention_of(&s);
    const Format f = { F32, 0 };
    Tensor qkv = make(f, 16, 512), y = make(f, 16, 256), lse = make_f32(16, 4);
    DIES("attention_forward: y is (16, 512); expected (16, 256)",
         attention_forward(qkv, lse.data, qkv, a, (Documents){ 0 }));
    DIES("attention_backward: dy is (16, 512)",
         attention_backward(qkv, qkv, qkv, y, lse.data, a, (Documents){ 0 }));
    a.K = 3;
    DIES("3 key/value heads", attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    a.K = 2, a.window = -1;
    DIES("a window of -1 keys", attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    DIES("a window of -1 keys", attention_backward(qkv, y, qkv, y, lse.data, a, (Documents){ 0 }));
    KvCache cache = { .k = make(f, 20, 128), .v = make(f, 20, 128), .length = 5 };
    a.window = 0;
    DIES("attention_cached: 2 sequences of 8 tokens", attention_cached(y, qkv, cache, a));
    a.B = 1, a.T = 16;
    DIES("attention_cached: 16 tokens after 5; the cache has room for 20",
         attention_cached(y, qkv, cache, a));
    cache.v.cols = 64;
    DIES("the cache's v is (20, 64); expected (20, 128)", attention_cached(y, qkv, cache, a));
    cache.v = make((Format){ BF16, 0 }, 20, 128), cache.length = 0;
    DIES("qkv is f32, y f32 and the cache f32", attention_cached(y, qkv, cache, a));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
