/* Attention by attention_mma.cu (BF16 and F32) and, on compute capability 9.0, by attention_sm90.cu
 * too (BF16), beyond the common tests: long sequences, many documents, every head width with its
 * own kernels, widths between these, windows, ends inside and on the edge of tiles. Sampled rows of
 * queries and keys are compared with a double reference; each call runs twice and must repeat its
 * bits.
 *
 * Bounds, with u = 2^-24 and w the unit roundoff of the tensor cores' inputs (BF16: 2^-8; F32: 0):
 * a score has an error of d = (D + 8) u scale sum|q k|, so p has a relative error of d before
 * rounding (w), and sums over n keys or queries have n u: in all e = w + 4 d + (2 n + 16) u. Hence
 *     y   e sum p|v|                          lse  d + (n + 16) u + 4 u |lse|
 *     ds  |ds| e + p a, a = (D + 4) u (sum|dy v| + sum|dy y|)             [ds = p (dp - delta)]
 *     dv  e sum p|dy|          dq, dk  scale sum (|ds| e + p a) |k| or |q|
 * and with several query heads per key head those of dk and dv may be rounded (w) before they are
 * added. */
#include "kernels/cuda/attention.h"
#include "tests/test.h"
#include "tests/kit.h"

#include <spawn.h>

/* documents: their number; 0: none. steep: unless 0, how much scores grow towards the first keys,
 * which some kernels process last: see make_steep */
typedef struct {
    const char *name;
    int B, T, H, K, D, documents, window;
    float steep;
} Shape;
// clang-format off
static const Shape small[] = {
    { "one token",   2, 1,   2, 1, 64,  0 },
    { "odd length",  3, 37,  4, 2, 64,  0 },
    { "width 96",    2, 130, 3, 1, 96,  0 },
    { "width 128",   2, 256, 4, 4, 128, 0 },
    { "documents",   3, 70,  4, 4, 64,  9 },
    { "documents, shared keys", 2, 300, 6, 2, 96, 21 },
    { "width 40",    2, 50,  4, 2, 40,  0 },
    { "width 256",   1, 65,  2, 2, 256, 3 },
    { "window 1",    2, 130, 4, 2, 64,  0, 1 },
    { "window 50",   2, 256, 4, 4, 128, 0, 50 },
    { "window 64 of 320, shared keys", 2, 320, 6, 2, 128, 0, 64 },
    { "window 127 of odd length",      1, 333, 4, 2, 64,  0, 127 },
    { "window of all but one",         1, 256, 2, 2, 64,  0, 255 },
    { "documents, window 40",          3, 300, 4, 2, 64,  9, 40 },
    { "width 96, window 100",          2, 130, 3, 1, 96,  0, 100 },
    { "width 40, window 33",           2, 100, 4, 2, 40,  3, 33 },
    { "a tile and a token, width 128", 2, 65,  2, 2, 128, 0 },
    { "a block and a token, width 64", 2, 129, 4, 1, 64,  0 },
    { "three blocks, shared keys",     1, 384, 8, 2, 128, 0 },
    { "window 129, width 128",         1, 400, 4, 2, 128, 0, 129 },
    { "window 65 of documents",        2, 300, 4, 1, 128, 5, 65 },
    { "steep, width 128",              1, 700, 4, 2, 128, 0, 0, 4 },
    { "steep, width 64",               2, 520, 4, 4, 64,  0, 0, 4 },
    { "steep documents, width 96",     2, 600, 3, 3, 96,  5, 0, 4 },
    { "width 16, four tiles",          1, 250, 2, 1, 16,  0 },
    { "width 100, window 70",          1, 260, 2, 1, 100, 0, 70 },
    { "width 6",                       2, 70,  3, 1, 6,   4 },
    { "width 160, documents",          2, 300, 4, 2, 160, 7 },
    { "width 256, window 100",         1, 400, 4, 2, 256, 0, 100 },
    { "steep, width 256",              1, 500, 2, 1, 256, 0, 0, 4 },
};
// clang-format on
// clang-format off
static const Shape large[] = {
    { "long sequences", 3, 8192, 4,  2, 64,  0 },
    { "a long sequence, shared keys", 1, 8192, 16, 4, 64,  0 },
    { "300 documents",      4, 2048, 4,  2, 128, 300 },
    { "long documents",     4, 2048, 16, 8, 64,  13 },
    { "window 1000 of long sequences", 3, 8192, 4,  2, 64,  0, 1000 },
    { "window 4096 of a long sequence", 1, 8192, 16, 8, 128, 0, 4096 },
    { "long documents, window 300",        4, 2048, 16, 8, 64,  13, 300 },
    { "two heads in the cache, then one",  1, 20000, 3, 3, 128, 0,  3000 },
    { "steep, bounds known from the first tile on",  1, 8192, 4, 2, 128, 0, 0, 1 },
    { "steep, bounds known from some tile on",       1, 8192, 4, 2, 128, 0, 0, 1.45f },
    { "steep, bounds known later, a head by itself", 1, 8192, 3, 1, 128, 0, 0, 1.45f },
    { "steep, never bounded",                        1, 8192, 4, 2, 128, 0, 0, 16 },
    { "steep, never bounded, width 64",              1, 8192, 3, 1, 64,  0, 0, 16 },
    { "steep documents, shared keys",                2, 8192, 6, 3, 96,  3, 0, 1.45f },
    { "width 256, shared keys",                      1, 4096, 8, 1, 256, 0 },
};
// clang-format on

/* Thread blocks of neighbouring keys share loads: long sequences, with an even number of blocks. */
static const Shape pairs[] = {
    { "neighbours, the last block of one tile", 1, 8380, 3, 1, 128, 0 },
    { "neighbours in a window, width 64", 1, 8192, 2, 1, 64, 0, 4200 },
};

/* Documents of one token up to as many documents as in training. If there are B documents, they are
 * the sequences themselves. */
// clang-format off
static Shape ladder[] = {
    { "whole sequences, shared keys, width 128",     8, 128,  8,  2,  128, 8 },
    { "16 documents, shared keys, width 128",        4, 512,  8,  2,  128, 16 },
    { "16 documents, own keys, width 128",           4, 512,  4,  4,  128, 16 },
    { "16 documents, shared keys, width 64",         4, 512,  8,  4,  64,  16 },
    { "16 documents, own keys, width 64",            4, 512,  4,  4,  64,  16 },
    { "16 documents, own keys, width 96",            4, 512,  2,  2,  96,  16 },
    { "one document, shared keys, width 128",        1, 128,  4,  1,  128, 1 },
    { "one odd document, own keys, width 64",        1, 37,   2,  2,  64,  1 },
    { "9 documents, shared keys, width 128",         3, 200,  8,  2,  128, 9 },
    { "9 documents, own keys, width 64",             3, 70,   4,  4,  64,  9 },
    { "300 documents, own keys, width 64",           2, 1024, 2,  2,  64,  300 },
    { "13 documents of three lengths, width 128",    4, 2048, 16, 4,  128, 13 },
    { "60 documents of four lengths, width 128",     4, 4096, 8,  8,  128, 60 },
    { "2 long documents, shared keys, width 64",     1, 8192, 16, 8,  64,  2 },
    { "2 long documents, own keys, width 64",        1, 8192, 32, 32, 64,  2 },
    { "window 100, shared keys, width 128",          4, 512,  8,  2,  128, 16, 100 },
    { "window 33, own keys, width 64",               4, 512,  4,  4,  64,  16, 33 },
    { "window 1, own keys, width 96",                4, 512,  2,  2,  96,  16, 1 },
    { "window 300, three lengths, width 128",        4, 2048, 16, 4,  128, 13, 300 },
    { "window 1000 of some lengths only, width 128", 4, 4096, 8,  8,  128, 60, 1000 },
    { "window 1000 of 2 long documents, width 64",   1, 8192, 16, 8,  64,  2,  1000 },
};
// clang-format on
enum { RUNGS = sizeof ladder / sizeof ladder[0] };

static char *program;

/* Selects the kernels that the program selects, or the kernels for every GPU. */
typedef struct {
    void (*forward)(Tensor, float *, Tensor, Attention, Documents);
    void (*backward)(Tensor, Tensor, Tensor, Tensor, const float *, Attention, Documents);
} Way;
static const Way taken = { attention_forward, attention_backward },
                 everywhere = { attention_mma_forward, attention_mma_backward };

/* All tensors in double, with the values that are stored on the device. */
typedef struct {
    Attention a;
    int S, count, *start; /* documents on the host; without documents: the sequences */
    double *qkv, *y, *dy, *dqkv, w;
    float *lse;
    bool documents, packed; /* packed: lse is (tokens, H), else (B, H, T) */
    Format format;
} Case;

/* Results compared in the current case. */
typedef enum { Y, LSE, DQ, DK, DV, PARTS } Part;
static const char *const part_name[] = { "y", "lse", "dq", "dk", "dv" };
static struct {
    long checked, wrong;
    char first[200];
} tally[PARTS];

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

static void check_value(Format f, Part part, int n, int h, int i, double x, double ref,
                        double bound)
{
    double limit = unit_roundoff(f) * (fabs(ref) + bound) + bound + 0x1p-126;
    tally[part].checked++;
    if (!(fabs(x - ref) <= limit) && tally[part].wrong++ == 0)
        snprintf(tally[part].first, sizeof tally[part].first,
                 "token %d, head %d, element %d is %.9g, expected %.9g; "
                 "off by %.3g, at most %.3g is explained",
                 n, h, i, x, ref, fabs(x - ref), limit);
}

/* Returns the first token that token n attends to, in a document that starts at `first`. */
static int first_seen(const Case *c, int first, int n)
{
    return c->a.window && n - c->a.window + 1 > first ? n - c->a.window + 1 : first;
}

/* Returns one past the last token that attends to token u, in a document that ends before `end`. */
static int end_seen(const Case *c, int u, int end)
{
    return c->a.window && u + c->a.window < end ? u + c->a.window : end;
}

/* Reports all wrong tensors at once, which is more useful than the first wrong number alone. */
static void check_tally(const char *name)
{
    long wrong = 0;
    for (int i = 0; i < PARTS; i++)
        wrong += tally[i].wrong;
    for (int i = 0; wrong && i < PARTS; i++)
        print_error("    %-3s %ld of %ld wrong%s%s\n", part_name[i], tally[i].wrong,
                    tally[i].checked, tally[i].wrong ? ": " : "", tally[i].first);
    memset(tally, 0, sizeof tally);
    if (wrong)
        fail_msg("%s: %ld numbers are wrong", name, wrong);
}

static double lse_of(const Case *c, int n, int h)
{
    const Attention a = c->a;
    return c->lse[c->packed ? n * a.H + h : (n / a.T * a.H + h) * a.T + n % a.T];
}

static double relative_error(const Case *c, double score_error, int n)
{
    return c->w + 4 * score_error + (2 * n + 16) * U24;
}

/* Checks y, lse and dq of token n, which sees tokens from `first` on. */
static void check_query(const Case *c, int first, int n, int h)
{
    const Attention a = c->a;
    const int D = a.D, kv = h / (a.H / a.K), keys = n - first + 1;
    double *p = keep(sizeof *p * (size_t)keys), top = -INFINITY, sum = 0, worst = 0, size, y_size,
           delta;
    double y[256] = { 0 }, y_abs[256] = { 0 }, dq[256] = { 0 }, dq_bound[256] = { 0 };
    for (int u = 0; u < keys; u++) {
        p[u] = a.scale * dot(query(c, n, h), key(c, first + u, kv), D, &size);
        top = fmax(top, p[u]);
        worst = fmax(worst, (D + 8) * U24 * a.scale * size);
    }
    for (int u = 0; u < keys; u++)
        sum += exp(p[u] - top);
    const double lse = top + log(sum), e = relative_error(c, worst, keys);
    check_value((Format){ F32, 0 }, LSE, n, h, 0, lse_of(c, n, h), lse,
                worst + (keys + 16) * U24 + 4 * U24 * fabs(lse));

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
        check_value(c->format, Y, n, h, i, at_y(c, c->y, n, h)[i], y[i], e * y_abs[i]);
        check_value(c->format, DQ, n, h, i, c->dqkv[(size_t)n * c->S + h * D + i], dq[i],
                    dq_bound[i]);
    }
}

/* Checks dk and dv of token u, which tokens before `end` see. */
static void check_key(const Case *c, int u, int end, int kv)
{
    const Attention a = c->a;
    const int D = a.D, group = a.H / a.K;
    double dk[256] = { 0 }, dv[256] = { 0 }, dk_bound[256] = { 0 }, dv_bound[256] = { 0 }, size,
           y_size;
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        double head_dk[256] = { 0 }, head_dv[256] = { 0 };
        for (int n = u; n < end; n++) {
            const double *dy = at_y(c, c->dy, n, h), *q = query(c, n, h);
            const double s = a.scale * dot(q, key(c, u, kv), D, &size);
            const double p = exp(s - lse_of(c, n, h)),
                         e = relative_error(c, (D + 8) * U24 * a.scale * size, end - u);
            const double delta = dot(dy, at_y(c, c->y, n, h), D, &y_size),
                         dp = dot(dy, value(c, u, kv), D, &size);
            const double ds = p * (dp - delta),
                         ds_bound = fabs(ds) * e + p * (D + 4) * U24 * (size + y_size);
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
        check_value(c->format, DK, u, kv, i, row[i], dk[i], dk_bound[i]);
        check_value(c->format, DV, u, kv, i, row[a.K * D + i], dv[i], dv_bound[i]);
    }
}

/* Checks the first, second and last row of a document and two others; all rows if there are few
 * heads. With a window, also checks the first row that does not attend to the first row, and the
 * last row to which the last row does not attend. */
static void check_document(const Case *c, int i)
{
    const int first = c->start[i], end = c->start[i + 1];
    const int rows[] = { first,
                         first + 1,
                         end - 1,
                         first + (int)(random_bits(1, i) % (unsigned)(end - first)),
                         first + (int)(random_bits(2, i) % (unsigned)(end - first)),
                         first + c->a.window,
                         end - 1 - c->a.window };
    for (int r = 0; r < (c->a.window ? 7 : 5); r++) {
        if (rows[r] < first || rows[r] >= end)
            continue;
        int h = (int)(random_bits(3, (uint64_t)rows[r]) % (unsigned)c->a.H);
        check_query(c, first_seen(c, first, rows[r]), rows[r], h);
        check_key(c, rows[r], end_seen(c, rows[r], end), h / (c->a.H / c->a.K));
    }
}

/* Makes the starts of `count` documents in B sequences of T tokens: the lengths start at 1, and are
 * spread evenly over the sequences. */
static void make_documents(Case *c, int count)
{
    const int B = c->a.B, T = c->a.T;
    c->documents = count > 0;
    c->count = count > 0 ? count : B;
    c->start = keep(sizeof *c->start * (size_t)(c->count + 1));
    for (int b = 0, i = 0; b < B; b++) {
        int here = c->count / B + (b < c->count % B), left = T;
        for (int j = 0; j < here; j++) {
            int most = left - (here - j - 1),
                random = (int)(random_bits(9, (uint64_t)i) % (unsigned)most);
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
        d.longest =
            c->start[i + 1] - c->start[i] > d.longest ? c->start[i + 1] - c->start[i] : d.longest;
    d.count = c->count;
    d.host_start = c->start;
    d.start = put_ints(c->start, (size_t)c->count + 1);
    return d;
}

/* Checks that every number was written, also outside of the samples. */
static void check_finite(const Case *c)
{
    for (size_t i = 0; i < (size_t)c->a.B * (size_t)c->a.T * (size_t)c->S; i++) {
        int n = (int)(i / (size_t)c->S), head = (int)(i % (size_t)c->S) / c->a.D;
        Part part = head < c->a.H ? DQ : head < c->a.H + c->a.K ? DK : DV;
        if (!isfinite(c->dqkv[i]))
            check_value(c->format, part, n, head, (int)(i % (size_t)c->a.D), c->dqkv[i], 0, 0);
    }
}

/* Runs without a window first, so that the workspace holds sums over every key. A kernel with a
 * window must not use these sums. */
static void fill_workspace(Way way, Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, float *lse,
                           Attention a, Documents docs)
{
    a.window = 0;
    way.forward(y, lse, qkv, a, docs);
    way.backward(dqkv, dy, qkv, y, lse, a, docs);
}

/* Multiplies queries by `steep`, and keys by 8 at the first token of a sequence, decreasing to 0
 * after its last. With 4 the first scores reach about 30. With 1 and 1.45 weights reach 2^8 and
 * more relative to those near the diagonal, and the bound from norms is within 2^64, at once or
 * after some tiles. With 16 it never is, and weights would overflow if a kernel assumed it; there
 * key heads after the first have keys a sixteenth as long, whose norms would be too small a bound
 * for the first head. */
static void make_steep(Tensor qkv, Attention a, float steep)
{
    const double *from = values(qkv);
    float *x = keep(tensor_numel(qkv) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(qkv); i++) {
        const int head = (int)(i % (size_t)qkv.cols) / a.D, t = (int)(i / (size_t)qkv.cols) % a.T;
        const float small = steep > 4 && head > a.H ? 1.0f / 16 : 1;
        const float factor = head < a.H         ? steep
                             : head < a.H + a.K ? 8 * (float)(a.T - t) / (float)a.T * small
                                                : 1;
        x[i] = factor * (float)from[i];
    }
    put(qkv, x);
}

static bool has_hopper(const Shape *s, Format format)
{
    return runs_on_hopper() && format.dtype == BF16 && (s->D == 64 || s->D == 96 || s->D == 128);
}

static void run_way(const Shape *s, Format format, Way way)
{
    Case c = { .format = format,
               .S = (s->H + 2 * s->K) * s->D,
               .w = format.dtype == BF16 ? 0x1p-8 : 0,
               .a = { .B = s->B,
                      .T = s->T,
                      .H = s->H,
                      .K = s->K,
                      .D = s->D,
                      .scale = 1 / sqrtf((float)s->D),
                      .window = s->window } };
    const int N = s->B * s->T;
    make_documents(&c, s->documents);
    c.packed = c.documents && way.forward == attention_forward && has_hopper(s, format);
    const Documents docs = documents_of(&c);
    Tensor qkv = make_filled(format, N, c.S, 1, -1, 1), y = make(format, N, s->H * s->D),
           lse = make_f32(N, s->H);
    Tensor dy = make_filled(format, N, s->H * s->D, 2, -1, 1), dqkv = make(format, N, c.S);
    if (s->steep > 0)
        make_steep(qkv, c.a, s->steep);
    if (s->window)
        fill_workspace(way, dqkv, dy, qkv, y, lse.data, c.a, docs);
    way.forward(y, lse.data, qkv, c.a, docs);
    way.backward(dqkv, dy, qkv, y, lse.data, c.a, docs);
    c.qkv = values(qkv), c.y = values(y), c.dy = values(dy), c.dqkv = values(dqkv);
    c.lse = tensor_snapshot(lse);
    for (int i = 0; i < c.count; i++)
        check_document(&c, i);
    check_finite(&c);
    check_tally(s->name);
    TWICE(way.forward(y, lse.data, qkv, c.a, docs), y, lse);
    TWICE(way.backward(dqkv, dy, qkv, y, lse.data, c.a, docs), dqkv);
    release();
}

static void run_case(const Shape *s, Format format)
{
    run_way(s, format, taken);
    if (has_hopper(s, format))
        run_way(s, format, everywhere);
}

static void run_shapes(const Shape *shapes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        print_message("  %s\n", shapes[i].name);
        run_case(&shapes[i], (Format){ BF16, 0 });
        run_case(&shapes[i], (Format){ F32, 0 });
    }
}

TEST(test_small)
{
    run_shapes(small, sizeof small / sizeof small[0]);
}

TEST(test_large)
{
    run_shapes(large, sizeof large / sizeof large[0]);
}

TEST(test_pairs)
{
    run_shapes(pairs, sizeof pairs / sizeof pairs[0]);
}

/* One case of documents, in a separate process. */
static void run_rung(void **state)
{
    run_case(*state, (Format){ BF16, 0 });
}

/* Documents in BF16, each case in a new process: an invalid memory access breaks all later work of
 * its process. */
TEST(test_documents)
{
    extern char **environ;
    int failed = 0;
    for (int i = 0; i < RUNGS; i++) {
        char rung[16];
        char *arguments[] = { program, "rung", rung, NULL };
        pid_t child;
        int status;
        snprintf(rung, sizeof rung, "%d", i);
        fflush(NULL);
        assert_int_equal(posix_spawn(&child, program, NULL, NULL, arguments, environ), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        failed += status != 0;
        print_message("  %s  %s\n", status ? "FAILED" : "passed", ladder[i].name);
    }
    if (failed)
        fail_msg("%d of %d cases of documents failed", failed, (int)RUNGS);
}

TEST(test_errors)
{
    const Attention a = { .B = 1, .T = 4, .H = 3, .K = 2, .D = 64, .scale = 1 };
    const Attention b = { .B = 1, .T = 4, .H = 1, .K = 1, .D = 300, .scale = 1 };
    const Format bf = { BF16, 0 }, f = { F32, 0 };
    Tensor qkv = make(bf, 4, 7 * 64), y = make(bf, 4, 3 * 64), lse = make_f32(4, 3);
    Tensor wide_qkv = make(f, 4, 900), wide_y = make(f, 4, 300);
    DIES("3 query heads, 2 key/value heads",
         attention_forward(y, lse.data, qkv, a, (Documents){ 0 }));
    DIES("heads of width 300", attention_forward(wide_y, lse.data, wide_qkv, b, (Documents){ 0 }));
    release();
}

/* ./test_cuda_attention [pattern]: only the tests whose names match, such as test_small under a
 * sanitizer; ./test_cuda_attention rung i: one case of documents. */
int main(int argc, char **argv)
{
    program = argv[0];
    if (argc == 3 && strcmp(argv[1], "rung") == 0 && (unsigned)atoi(argv[2]) < RUNGS) {
        Shape *rung = &ladder[atoi(argv[2])];
        /* otherwise the case would count as a test */
        cmocka_set_message_output(CM_OUTPUT_TAP);
        num_tests = 0;
        add_test(rung->name, run_rung, rung);
        return run_all_tests(start_device, NULL);
    }
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return run_all_tests(start_device, NULL);
}
