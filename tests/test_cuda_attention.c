/* Attention by cuDNN (BF16) and by attention_plain.cu (F32) where the common tests do not reach: long sequences, with
 * a backward in parts, many documents, whose launches are padded, and every head width that cuDNN takes. Rows of
 * queries and keys are sampled and compared with a double reference; each call runs twice and must repeat its bits.
 *
 * Bounds, with u = 2^-24 and w the unit roundoff of what the tensor cores read (BF16: 2^-8; F32: 0):
 * a score errs by d = (D + 8) u scale sum|q k|, so p errs relatively by d before it is rounded (w), and sums over n
 * keys or queries err by n u: in all e = w + 4 d + (2 n + 16) u. From there
 *     y   e sum p|v|                          lse  d + (n + 16) u + 4 u |lse|
 *     ds  |ds| e + p a, a = (D + 4) u (sum|dy v| + sum|dy y|)             [ds = p (dp - delta)]
 *     dv  e sum p|dy|          dq, dk  scale sum (|ds| e + p a) |k| or |q|
 * and with several query heads per key head those of dk and dv are rounded (w) before they are added. */
#include "tests/kit.h"

typedef struct { const char *name; int B, T, H, K, D, documents; } Shape;     /* documents: their number; 0: none */
static const Shape small[] = {
    { "one token",   2, 1,   2, 1, 64,  0 },
    { "odd length",  3, 37,  4, 2, 64,  0 },
    { "width 96",    2, 130, 3, 1, 96,  0 },
    { "width 128",   2, 256, 4, 4, 128, 0 },
    { "documents",   3, 70,  4, 4, 64,  9 },
    { "documents, shared keys", 2, 300, 6, 2, 96, 21 },
    { "width 40",    2, 50,  4, 2, 40,  0 },
    { "width 256",   1, 65,  2, 2, 256, 3 },
};
static const Shape large[] = {
    { "parts of the batch", 3, 8192, 2, 1, 64,  0 },
    { "parts of the heads", 1, 8192, 8, 2, 64,  0 },
    { "300 documents",      4, 2048, 4, 2, 128, 300 },
    { "long documents",     4, 2048, 8, 8, 64,  13 },
};

/* Everything in double, as the device holds it. */
typedef struct {
    Attention a;
    int S, count, *start;           /* documents on the host: the sequences if there are none */
    double *qkv, *y, *dy, *dqkv, w;
    float *lse;
    bool documents;
    Format format;
} Case;

static const double *query(const Case *c, int n, int h)
{
    return c->qkv + (size_t)n * c->S + h * c->a.D;
}

static const double *key(const Case *c, int n, int k)
{
    return query(c, n, c->a.H + k);
}

static const double *value(const Case *c, int n, int k)
{
    return query(c, n, c->a.H + c->a.K + k);
}

static const double *at_y(const Case *c, const double *y, int n, int h)
{
    return y + ((size_t)n * c->a.H + h) * c->a.D;
}

static double dot(const double *a, const double *b, int D, double *size)
{
    double sum = 0;
    *size = 0;
    for (int i = 0; i < D; i++) {
        sum += a[i] * b[i];
        *size += fabs(a[i] * b[i]);
    }
    return sum;
}

static void check_value(const Case *c, const char *what, int n, int h, int i, double x, double ref, double bound)
{
    double limit = unit_roundoff(c->format) * (fabs(ref) + bound) + bound + 0x1p-126;
    if (!(fabs(x - ref) <= limit))
        fail_msg("%s of token %d, head %d, element %d: %.9g, expected %.9g; off by %.3g, at most %.3g is explained",
                 what, n, h, i, x, ref, fabs(x - ref), limit);
}

/* lse: (B, H, T), and with documents in BF16 (tokens, H), as cuDNN packs it. */
static double lse_of(const Case *c, int n, int h)
{
    const Attention a = c->a;
    bool packed = c->documents && c->format.dtype == BF16 && (a.D == 64 || a.D == 96 || a.D == 128);
    return c->lse[packed ? n * a.H + h : (n / a.T * a.H + h) * a.T + n % a.T];
}

static double relative_error(const Case *c, double score_error, int n)
{
    return c->w + 4 * score_error + (2 * n + 16) * U24;
}

/* y, lse and dq of token n, whose document begins at `first`. */
static void check_query(const Case *c, int first, int n, int h)
{
    const Attention a = c->a;
    const int D = a.D, kv = h / (a.H / a.K), keys = n - first + 1;
    double *p = keep(sizeof *p * (size_t)keys), top = -INFINITY, sum = 0, worst = 0, size, y_size, delta;
    double y[256] = { 0 }, y_abs[256] = { 0 }, dq[256] = { 0 }, dq_bound[256] = { 0 };
    for (int u = 0; u < keys; u++) {
        p[u] = a.scale * dot(query(c, n, h), key(c, first + u, kv), D, &size);
        top = fmax(top, p[u]);
        worst = fmax(worst, (D + 8) * U24 * a.scale * size);
    }
    for (int u = 0; u < keys; u++)
        sum += exp(p[u] - top);
    const double lse = top + log(sum), e = relative_error(c, worst, keys);
    const Case f32 = { .format = { F32, 0 } };
    check_value(&f32, "lse", n, h, 0, lse_of(c, n, h), lse, worst + (keys + 16) * U24 + 4 * U24 * fabs(lse));

    delta = dot(at_y(c, c->dy, n, h), at_y(c, c->y, n, h), D, &y_size);
    for (int u = 0; u < keys; u++) {
        const double *k = key(c, first + u, kv), *v = value(c, first + u, kv);
        const double weight = exp(p[u] - lse), dp = dot(at_y(c, c->dy, n, h), v, D, &size);
        const double ds = weight * (dp - delta);
        const double ds_bound = fabs(ds) * e + weight * (D + 4) * U24 * (size + y_size);
        for (int i = 0; i < D; i++) {
            y[i] += weight * v[i];
            y_abs[i] += weight * fabs(v[i]);
            dq[i] += a.scale * ds * k[i];
            dq_bound[i] += a.scale * ds_bound * fabs(k[i]);
        }
    }
    for (int i = 0; i < D; i++) {
        check_value(c, "y", n, h, i, at_y(c, c->y, n, h)[i], y[i], e * y_abs[i]);
        check_value(c, "dq", n, h, i, c->dqkv[(size_t)n * c->S + h * D + i], dq[i], dq_bound[i]);
    }
}

/* dk and dv of token u, whose document ends in front of `end`. */
static void check_key(const Case *c, int u, int end, int kv)
{
    const Attention a = c->a;
    const int D = a.D, group = a.H / a.K;
    double dk[256] = { 0 }, dv[256] = { 0 }, dk_bound[256] = { 0 }, dv_bound[256] = { 0 }, size, y_size;
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        double head_dk[256] = { 0 }, head_dv[256] = { 0 };
        for (int n = u; n < end; n++) {
            const double *dy = at_y(c, c->dy, n, h), *q = query(c, n, h);
            const double s = a.scale * dot(q, key(c, u, kv), D, &size);
            const double p = exp(s - lse_of(c, n, h)), e = relative_error(c, (D + 8) * U24 * a.scale * size, end - u);
            const double delta = dot(dy, at_y(c, c->y, n, h), D, &y_size), dp = dot(dy, value(c, u, kv), D, &size);
            const double ds = p * (dp - delta), ds_bound = fabs(ds) * e + p * (D + 4) * U24 * (size + y_size);
            for (int i = 0; i < D; i++) {
                head_dv[i] += p * dy[i];
                head_dk[i] += a.scale * ds * q[i];
                dv_bound[i] += e * p * fabs(dy[i]);
                dk_bound[i] += a.scale * ds_bound * fabs(q[i]);
            }
        }
        for (int i = 0; i < D; i++) {
            dk[i] += head_dk[i], dv[i] += head_dv[i];
            dk_bound[i] += group > 1 ? c->w * fabs(head_dk[i]) : 0;
            dv_bound[i] += group > 1 ? c->w * fabs(head_dv[i]) : 0;
        }
    }
    const double *row = c->dqkv + (size_t)u * c->S + (a.H + kv) * D;
    for (int i = 0; i < D; i++) {
        check_value(c, "dk", u, kv, i, row[i], dk[i], dk_bound[i]);
        check_value(c, "dv", u, kv, i, row[a.K * D + i], dv[i], dv_bound[i]);
    }
}

/* First, second, last and two other rows of a document, all of them for few heads. */
static void check_document(const Case *c, int i)
{
    const int first = c->start[i], end = c->start[i + 1];
    const int rows[] = { first, first + 1, end - 1, first + (int)(random_bits(1, i) % (unsigned)(end - first)),
                         first + (int)(random_bits(2, i) % (unsigned)(end - first)) };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        if (rows[r] >= end)
            continue;
        int h = (int)(random_bits(3, (uint64_t)rows[r]) % (unsigned)c->a.H);
        check_query(c, first, rows[r], h);
        check_key(c, rows[r], end, h / (c->a.H / c->a.K));
    }
}

/* Starts of `count` documents in B sequences of T tokens: lengths from 1 on, spread evenly over the sequences. */
static void make_documents(Case *c, int count)
{
    const int B = c->a.B, T = c->a.T;
    c->documents = count > 0;
    c->count = count > 0 ? count : B;
    c->start = keep(sizeof *c->start * (size_t)(c->count + 1));
    for (int b = 0, i = 0; b < B; b++) {
        int here = c->count / B + (b < c->count % B), left = T;
        for (int j = 0; j < here; j++) {
            int most = left - (here - j - 1), random = (int)(random_bits(9, (uint64_t)i) % (unsigned)most);
            int length = j == here - 1 ? left : 1 + random / 2;
            c->start[i++] = b * T + T - left;
            left -= length;
        }
    }
    c->start[c->count] = B * T;
}

static Documents documents_of(const Case *c)
{
    Documents d = { 0 };
    if (!c->documents)
        return d;
    for (int i = 0; i < c->count; i++)
        d.longest = c->start[i + 1] - c->start[i] > d.longest ? c->start[i + 1] - c->start[i] : d.longest;
    d.count = c->count;
    d.start = put_ints(c->start, (size_t)c->count + 1);
    return d;
}

static void run_case(const Shape *s, Format format)
{
    Case c = { .format = format, .S = (s->H + 2 * s->K) * s->D, .w = format.dtype == BF16 ? 0x1p-8 : 0,
               .a = { .B = s->B, .T = s->T, .H = s->H, .K = s->K, .D = s->D, .scale = 1 / sqrtf((float)s->D) } };
    const int N = s->B * s->T;
    make_documents(&c, s->documents);
    const Documents docs = documents_of(&c);
    Tensor qkv = make_filled(format, N, c.S, 1, -1, 1), y = make(format, N, s->H * s->D), lse = make_f32(N, s->H);
    Tensor dy = make_filled(format, N, s->H * s->D, 2, -1, 1), dqkv = make(format, N, c.S);
    TWICE(attention_forward(y, lse.data, qkv, c.a, docs), y, lse);
    TWICE(attention_backward(dqkv, dy, qkv, y, lse.data, c.a, docs), dqkv);
    c.qkv = values(qkv), c.y = values(y), c.dy = values(dy), c.dqkv = values(dqkv);
    c.lse = tensor_snapshot(lse);
    for (size_t i = 0; i < tensor_numel(dqkv); i++)
        if (!isfinite(c.dqkv[i]))
            fail_msg("dqkv[%zu] is %g", i, c.dqkv[i]);
    for (int i = 0; i < c.count; i++)
        check_document(&c, i);
    release();
}

static void run_shapes(const Shape *shapes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        print_message("  %s\n", shapes[i].name);
        run_case(&shapes[i], (Format){ BF16, 0 });
        run_case(&shapes[i], (Format){ F32, 0 });
    }
}

static void test_small(void **state)
{
    (void)state;
    run_shapes(small, sizeof small / sizeof small[0]);
}

static void test_large(void **state)
{
    (void)state;
    run_shapes(large, sizeof large / sizeof large[0]);
}

static void test_errors(void **state)
{
    (void)state;
    const Attention a = { .B = 1, .T = 4, .H = 3, .K = 2, .D = 64, .scale = 1 };
    const Attention b = { .B = 1, .T = 4, .H = 1, .K = 1, .D = 300, .scale = 1 };
    const Format bf = { BF16, 0 }, f = { F32, 0 };
    Tensor qkv = make(bf, 4, 7 * 64), y = make(bf, 4, 3 * 64), lse = make_f32(4, 3);
    DIES("3 query heads, 2 key/value heads", attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    DIES("head width 300", attention_forward(make(f, 4, 300), lse.data, make(f, 4, 900), b, (Documents){ 0 }));
    release();
}

/* ./test_cuda_attention [pattern]: only the tests whose names match, such as test_small under a sanitizer. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small), cmocka_unit_test(test_large), cmocka_unit_test(test_errors),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, start_device, NULL);
}
