/* RoPE with clamp and QK-norm, and causal attention, against a double reference, within bounds derived next to each.
 * Notation and assumptions as in test_kernels.c. */
#include "tests/golden.h"

#include <limits.h>

typedef struct { const char *name; int B, T, H, K, D; bool documents, odd; int window; } Shape;
static const Shape shapes[] = {
    { "one",   1, 1,   1, 1, 2,   false, true },
    { "odd",   2, 7,   3, 1, 6,   false, true },
    { "docs",  2, 7,   4, 2, 6,   true,  true },
    { "d64",   2, 48,  4, 2, 64,  false, false },
    { "d64-docs", 2, 48, 4, 2, 64, true, false },
    { "d128",  1, 136, 2, 1, 128, false, false },
    { "d128-docs", 1, 136, 2, 2, 128, true, false },
};
/* Attention with a window, which ends inside and on the edge of what a back end does at once: 32 keys, 128 rows. */
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
enum { SHAPES = sizeof shapes / sizeof shapes[0], WINDOWS = sizeof windows / sizeof windows[0] };

static char label[128];
static const char *name(const char *op, const FormatRow *f, const Shape *s)
{
    snprintf(label, sizeof label, "%s/%s/%s", op, f->name, s->name);
    return label;
}

static void check(const char *op, const FormatRow *f, const Shape *s, Tensor t, const double *ref,
                  const double *bound)
{
    check_close(name(op, f, s), t, ref, bound);
    golden_check(label, t, bound);
}

static void for_all(const Shape *of, int count, void (*test)(const FormatRow *, const Shape *))
{
    for (int f = 0; f < FORMAT_ROWS; f++)
        for (int s = 0; s < count; s++)
            if (on_cpu() || !of[s].odd) {
                test(&format_rows[f], &of[s]);
                release();
            }
}

static double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

/* ---- RoPE -------------------------------------------------------------------------------------------------- */

typedef struct { float clip; bool norm; const char *forward, *backward, *dqnorm, *dknorm; } RopeCase;
static const RopeCase rope_cases[] = {
    { 0, false, "rope_forward", "rope_backward", NULL, NULL },
    { 0.75f, false, "rope_forward-clip", "rope_backward-clip", NULL, NULL },
    { 0.75f, true, "rope_forward-clip-norm", "rope_backward-clip-norm", "dqnorm-clip", "dknorm-clip" },
    { 0, true, "rope_forward-norm", "rope_backward-norm", "dqnorm", "dknorm" },
};

static float *rope_table(int T, int D)
{
    float *host = keep(sizeof *host * (size_t)(T * D)), *table = guarded(sizeof *host * (size_t)(T * D));
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            double angle = t * pow(10000, -2.0 * i / D);
            host[t * D + 2 * i] = (float)cos(angle), host[t * D + 2 * i + 1] = (float)sin(angle);
        }
    device_put(table, host, sizeof *host * (size_t)(T * D));
    return table;
}

static Attention attention_of(const Shape *s)
{
    return (Attention){ .B = s->B, .T = s->T, .H = s->H, .K = s->K, .D = s->D, .scale = 1 / sqrtf((float)s->D),
                        .norm = { RMS_NORM, 1e-5f }, .rope = rope_table(s->T, s->D), .window = s->window };
}

static double clamp(double x, double limit)
{
    return limit > 0 ? fmin(fmax(x, -limit), limit) : x;
}

/* One rotation of a pair by +-angle: two products and a sum, 3 u of the sizes, plus the errors of the inputs. */
static void rotate(double *x, double *e, int heads, int D, const float *table, double sign)
{
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < D / 2; i++) {
            int p = h * D + i, q = p + D / 2;
            double c = table[2 * i], s = sign * table[2 * i + 1], a = x[p], b = x[q], ea = e[p], eb = e[q];
            x[p] = a * c - b * s, x[q] = a * s + b * c;
            e[p] = fabs(c) * ea + fabs(s) * eb + 3 * U24 * (fabs(a * c) + fabs(b * s));
            e[q] = fabs(s) * ea + fabs(c) * eb + 3 * U24 * (fabs(a * s) + fabs(b * c));
        }
}

/* x (width) = x r w; r, from a sum of `width` squares, errs relatively by (width/2 + 6) u. */
static double norm_row(double *x, double *e, int width, const double *w, double eps)
{
    double square = 0;
    for (int i = 0; i < width; i++)
        square += x[i] * x[i] / width;
    double r = 1 / sqrt(square + eps);
    for (int i = 0; i < width; i++) {
        x[i] *= r * w[i];
        e[i] = (width / 2.0 + 10) * U24 * fabs(x[i]);
    }
    return r;
}

/* d = r (d w - h mean(d w h)), h = u r: a mean of `width` terms errs by (width + 8) u of its absolute mean, more by
 * the errors e of the d it is made of. dw += d h. */
static void norm_row_backward(double *d, double *e, double *dw, double *bw, const double *x, int width, double clip,
                              double r, const double *w)
{
    double mean = 0, size = 0, carried = 0;
    for (int i = 0; i < width; i++) {
        double h = clamp(x[i], clip) * r;
        mean += d[i] * w[i] * h / width;
        size += fabs(d[i] * w[i] * h) / width;
        carried += e[i] * fabs(w[i] * h) / width;
        dw[i] += d[i] * h;
        bw[i] += e[i] * fabs(h) + 4 * U24 * fabs(d[i] * h);
    }
    for (int i = 0; i < width; i++) {
        double h = clamp(x[i], clip) * r, g = d[i] * w[i];
        e[i] = r * (e[i] * fabs(w[i]) + 6 * U24 * (fabs(g) + fabs(h * mean))
                    + fabs(h) * ((width + 8) * U24 * size + carried));
        d[i] = r * (g - h * mean);
    }
}

/* A case of RoPE: tensors, their values, and the stats that backward is given. */
typedef struct {
    const FormatRow *f;
    const Shape *s;
    const RopeCase *k;
    Attention a;
    int N, Q, KW, S;            /* tokens; widths of q, of k and of a row */
    Tensor x, qw, kw, stats;
    double *X, *QW, *KN;
    float *table;
} Rope;

static Rope rope_setup(const FormatRow *f, const Shape *s, const RopeCase *k)
{
    Rope r = { .f = f, .s = s, .k = k, .a = attention_of(s), .N = s->B * s->T, .Q = s->H * s->D, .KW = s->K * s->D };
    const size_t table_bytes = sizeof *r.table * (size_t)(s->T * s->D);
    r.a.clip = k->clip;
    r.S = r.Q + 2 * r.KW;
    r.table = keep(table_bytes);
    device_get(r.table, r.a.rope, table_bytes);
    r.x = make_filled(f->act, r.N, r.S, 1, -1, 1);
    r.stats = make_f32(r.N, 2);
    r.qw = k->norm ? make_filled(f->weight, 1, r.Q, 2, 0.5f, 1.5f) : NONE;
    r.kw = k->norm ? make_filled(f->weight, 1, r.KW, 3, 0.5f, 1.5f) : NONE;
    r.X = values(r.x), r.QW = values(r.qw), r.KN = values(r.kw);
    return r;
}

static void rope_forward_case(Rope *r)
{
    const int S = r->S;
    const size_t n = (size_t)r->N * (size_t)S;
    double *ref = doubles(n), *e = doubles(n);
    float *rstd = keep(sizeof *rstd * 2 * (size_t)r->N), *stats = r->k->norm ? r->stats.data : NULL;
    Tensor y = make(r->f->act, r->N, S);
    TWICE(rope_forward(y, stats, r->x, r->qw, r->kw, r->a), y, r->stats);
    for (int t = 0; t < r->N; t++) {
        double *row = ref + t * S, *er = e + t * S;
        for (int i = 0; i < S; i++)
            row[i] = clamp(r->X[t * S + i], r->k->clip);
        if (r->k->norm) {
            rstd[2 * t] = (float)norm_row(row, er, r->Q, r->QW, r->a.norm.eps);
            rstd[2 * t + 1] = (float)norm_row(row + r->Q, er + r->Q, r->KW, r->KN, r->a.norm.eps);
        }
        rotate(row, er, r->s->H + r->s->K, r->s->D, r->table + (t % r->s->T) * r->s->D, 1);
    }
    check(r->k->forward, r->f, r->s, y, ref, e);
    if (!r->k->norm) {
        Tensor in_place = make_filled(r->f->act, r->N, S, 1, -1, 1);
        TWICE(rope_forward(in_place, NULL, in_place, NONE, NONE, r->a), in_place);
        check_same_bytes("rope in place", tensor_snapshot(in_place), tensor_snapshot(y), tensor_bytes(y));
    }
    put(r->stats, rstd);        /* backward reads the same bits on both back ends */
}

/* dqnorm, dknorm: sums of N terms below 4 in size (|h| < 2.5, |d| < 1.5) and the old value. */
static double *sum_bound(const Rope *r, int width)
{
    double *b = doubles((size_t)width);
    for (int i = 0; i < width; i++)
        b[i] = (r->N + 2) * U24 * (4.0 * r->N + 1);
    return b;
}

static void rope_backward_case(Rope *r)
{
    const int S = r->S, Q = r->Q, KW = r->KW;
    const bool norm = r->k->norm;
    Tensor dy = make_filled(r->f->act, r->N, S, 6, -1, 1), dx = make(r->f->act, r->N, S);
    Tensor dqw = norm ? make_filled(r->f->grad, 1, Q, 4, -1, 1) : NONE;
    Tensor dkw = norm ? make_filled(r->f->grad, 1, KW, 5, -1, 1) : NONE;
    double *ref = values(dy), *e = doubles((size_t)r->N * (size_t)S), *dq = values(dqw), *dk = values(dkw);
    double *bq = sum_bound(r, Q), *bk = sum_bound(r, KW), *rstd = values(r->stats);
    const float *stats = norm ? r->stats.data : NULL;
    TWICE(rope_backward(dx, dqw, dkw, dy, r->x, stats, r->qw, r->kw, r->a), dx, dqw, dkw);
    for (int t = 0; t < r->N; t++) {
        double *row = ref + t * S, *er = e + t * S, *from = r->X + t * S;
        rotate(row, er, r->s->H + r->s->K, r->s->D, r->table + (t % r->s->T) * r->s->D, -1);
        if (norm) {
            norm_row_backward(row, er, dq, bq, from, Q, r->k->clip, rstd[2 * t], r->QW);
            norm_row_backward(row + Q, er + Q, dk, bk, from + Q, KW, r->k->clip, rstd[2 * t + 1], r->KN);
        }
        for (int i = 0; i < S; i++)
            if (r->k->clip > 0 && fabs(from[i]) > r->k->clip)
                row[i] = er[i] = 0;
    }
    check(r->k->backward, r->f, r->s, dx, ref, e);
    if (norm) {
        check(r->k->dqnorm, r->f, r->s, dqw, dq, bq);
        check(r->k->dknorm, r->f, r->s, dkw, dk, bk);
    }
    TWICE(rope_backward(dy, NONE, NONE, dy, r->x, stats, r->qw, r->kw, r->a), dy);
    check_same_bytes("rope_backward in place", tensor_snapshot(dy), tensor_snapshot(dx), tensor_bytes(dx));
}

static void rope_all(const FormatRow *f, const Shape *s)
{
    for (size_t i = 0; i < sizeof rope_cases / sizeof rope_cases[0]; i++) {
        Rope r = rope_setup(f, s, &rope_cases[i]);
        rope_forward_case(&r);
        rope_backward_case(&r);
        release();
    }
}

static void test_rope(void **state)
{
    (void)state;
    for_all(shapes, SHAPES, rope_all);
}

/* ---- attention --------------------------------------------------------------------------------------------- */

/* Documents of 1, then 2, 4, ... tokens to the end of each sequence. */
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
    d.start = put_ints(start, (size_t)d.count + 1);
    return d;
}

/* First token of token n's document. */
static int document_begin(const Shape *s, int n)
{
    int first = n / s->T * s->T;
    if (!s->documents)
        return first;
    for (int length = 1; first + length <= n; length *= 2)
        first += length;
    return first;
}

/* The first token that token n sees. */
static int first_seen(const Shape *s, int n)
{
    const int first = document_begin(s, n), nearest = n - s->window + 1;
    return s->window && nearest > first ? nearest : first;
}

/* A query row of a head: scores' errors, probabilities, output, and what an implementation may err.
 * score:  a dot product of D terms: 2 (D+2) u sum|q||k| scale, and exp's argument is rounded:
 *         es = max of that + u (|s|+|max|)
 * p:      relatively ep = 2 es + (keys + 12) u, more if an operand format rounds it for the next GEMM (uP)
 * y:      sum p |v| (ep + uP + 2 (keys + 2) u)          lse: es + (keys + 12) u + 2 u |lse| */
typedef struct { int first, keys; double *p, ep, lse, lse_error; } Row;

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

static void forward_row(double *y, double *bound, const Row *r, const double *qkv, const Shape *s, int h, double uP)
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

/* Adds row n's share to dq, dk, dv (G) and to what they may err (E). dp = dy.v, delta = dy.y, ds = p (dp - delta):
 * p read back through lse errs by ep + lse_error; dp by 2 (D+2) u sum|dy||v|; delta through y, which is as the back
 * end rounded it (ey), and by (D+2) u; ds may be rounded for the next GEMM (uP). Sums of up to T H/K terms err by
 * 2 (T H/K + 2) u. uP twice: a back end may round dk and dv of each query head before it adds the heads. */
static void backward_row(double *G, double *E, const Row *r, const double *qkv, const double *dy, const double *y,
                         const double *ey, const Shape *s, int n, int h, double scale, double uP)
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
        double ds = p * (dp - delta), e = p * (e_dp + e_delta + 2 * U24 * (fabs(dp) + fabs(delta))) + fabs(ds) * ep;
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
    Tensor qkv = make_filled(f->act, N, S, 1, -2, 2), y = make(f->act, N, O), lse = make_f32(N, s->H);
    Tensor dy = make_filled(f->act, N, O, 2, -1, 1), dqkv = make(f->act, N, S);
    double *X = values(qkv), *DY = values(dy), *ref = doubles((size_t)(N * O)), *bound = doubles((size_t)(N * O));
    double *G = doubles((size_t)(N * S)), *E = doubles((size_t)(N * S));
    double *L = doubles((size_t)(N * s->H)), *el = doubles((size_t)(N * s->H)), *ey = doubles((size_t)s->D);

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
    if (!s->documents)      /* with documents a back end has its own layout */
        check("attention_lse", f, s, lse, L, el);
    check("attention_backward", f, s, dqkv, G, E);
}

static void test_attention(void **state)
{
    (void)state;
    for_all(shapes, SHAPES, attention_case);
}

static void test_windows(void **state)
{
    (void)state;
    for_all(windows, WINDOWS, attention_case);
}

/* Documents that are whole sequences are the same as none. */
static void test_whole_documents(void **state)
{
    (void)state;
    const Shape s = { "whole", 2, 48, 4, 2, 64, false, false };
    const Attention a = attention_of(&s);
    const Format f = { F32, 0 };
    const Documents docs = { .count = 2, .longest = s.T, .start = put_ints((int[]){ 0, s.T, 2 * s.T }, 3) };
    Tensor qkv = make_filled(f, 96, 512, 1, -2, 2), y = make(f, 96, 256), z = make(f, 96, 256), lse = make_f32(96, 4);
    attention_forward(y, lse.data, qkv, a, (Documents){ 0 });
    attention_forward(z, lse.data, qkv, a, docs);
    const double *expected = values(y);
    double *bound = doubles(96 * 256);
    for (int i = 0; i < 96 * 256; i++)      /* |v| <= 2; as above with |s| <= sqrt(64) 4 in the worst case */
        bound[i] = 2 * 2 * (4 * (64 + 2) * U24 * 32 + 128 * U24);
    check_close("whole documents", z, expected, bound);
    release();
}

/* A window that reaches every key is the same as none: in every bit, and with documents as soon as it covers each. */
static void wide_window(const FormatRow *f, const Shape *s)
{
    Attention a = attention_of(s);
    const Documents docs = documents_of(s);
    const int N = s->B * s->T, S = (s->H + 2 * s->K) * s->D, O = s->H * s->D;
    const int longest = s->documents ? docs.longest : s->T, wide[] = { longest, longest + 1, INT_MAX };
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

static void test_wide_windows(void **state)
{
    (void)state;
    for_all(shapes, SHAPES, wide_window);
}

static void test_errors(void **state)
{
    (void)state;
    const Shape s = { "errors", 2, 8, 4, 2, 64, false, false };
    Attention a = attention_of(&s);
    const Format f = { F32, 0 };
    Tensor qkv = make(f, 16, 512), y = make(f, 16, 256), w = make(f, 1, 256), lse = make_f32(16, 4);
    DIES("rope_forward: qkv is (16, 256); expected (16, 512)", rope_forward(qkv, NULL, y, NONE, NONE, a));
    DIES("rope_forward: y is (16, 256)", rope_forward(y, NULL, qkv, NONE, NONE, a));
    DIES("knorm is (1, 256); expected (1, 128)", rope_forward(qkv, lse.data, qkv, w, w, a));
    DIES("both have a norm", rope_forward(qkv, lse.data, qkv, w, NONE, a));
    DIES("attention_forward: y is (16, 512); expected (16, 256)",
         attention_forward(qkv, lse.data, qkv, a, (Documents){ 0 }));
    DIES("attention_backward: dy is (16, 512)",
         attention_backward(qkv, qkv, qkv, y, lse.data, a, (Documents){ 0 }));
    a.K = 3;
    DIES("3 key/value heads", attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    a.K = 2, a.window = -1;
    DIES("a window of -1 keys", attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    DIES("a window of -1 keys", attention_backward(qkv, y, qkv, y, lse.data, a, (Documents){ 0 }));
    release();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope), cmocka_unit_test(test_attention), cmocka_unit_test(test_windows),
        cmocka_unit_test(test_wide_windows), cmocka_unit_test(test_whole_documents), cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, start_device, NULL);
}
