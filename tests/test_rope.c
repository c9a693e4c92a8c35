/* Compares RoPE with a clamp and QK-norm, of q and k as a whole or per head, with a double
 * reference. A comment derives each bound. Notation and assumptions are those of test_kernels.c. */
#include "tests/test.h"
#include "tests/heads.h"
#include "tests/rotate.h"

static const Shape shapes[] = {
    { "one", 1, 1, 1, 1, 2 },   { "mqa", 2, 7, 3, 1, 6 },      { "gqa", 2, 7, 4, 2, 6 },
    { "d64", 2, 48, 4, 2, 64 }, { "d128", 1, 136, 2, 1, 128 }, { "d128-mha", 1, 136, 2, 2, 128 },
};

/* Further shapes for norms per head. For the CUDA back end: half heads that are not multiples of
 * packs of 8, or of 3, 5 and 6 packs; more heads than a thread block holds; more tokens than thread
 * blocks. */
// clang-format off
static const Shape head_shapes[] = {
    { "d16", 2, 9, 4, 2, 16 },     { "d24", 2, 7, 3, 1, 24 },     { "d40", 1, 5, 4, 4, 40 },
    { "d80", 1, 5, 2, 1, 80 },     { "d96", 2, 5, 4, 2, 96 },     { "d48", 2, 3, 8, 2, 48 },
    { "d512", 1, 2, 48, 12, 512 }, { "many", 2, 2700, 2, 1, 16 },
};
// clang-format on

typedef enum { NO_NORM, WHOLE, BY_HEAD } Norms;
typedef struct {
    float clip;
    Norms norm;
    const char *forward, *stats, *backward, *dqnorm, *dknorm;
} RopeCase;
static const RopeCase rope_cases[] = {
    { 0, NO_NORM, "rope_forward", NULL, "rope_backward", NULL, NULL },
    { 0.75f, NO_NORM, "rope_forward-clip", NULL, "rope_backward-clip", NULL, NULL },
    { 0.75f, WHOLE, "rope_forward-clip-norm", "rope_stats-clip", "rope_backward-clip-norm",
      "dqnorm-clip", "dknorm-clip" },
    { 0, WHOLE, "rope_forward-norm", "rope_stats", "rope_backward-norm", "dqnorm", "dknorm" },
    { 0.75f, BY_HEAD, "rope_forward-clip-heads", "rope_stats-clip-heads",
      "rope_backward-clip-heads", "dqnorm-clip-heads", "dknorm-clip-heads" },
    { 0, BY_HEAD, "rope_forward-heads", "rope_stats-heads", "rope_backward-heads", "dqnorm-heads",
      "dknorm-heads" },
};
enum { ROPE_CASES = sizeof rope_cases / sizeof rope_cases[0] };

/* x (width) = x r w; r, from a sum of `width` squares, has a relative error of (width/2 + 6) u. */
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

/* Number of terms of dqnorm and dknorm that a back end may add one after the other in F32 before it
 * continues in F64. */
enum { CHAIN = 64 };

/* d = r (d w - h mean(d w h)), h = u r: a mean of `width` terms has an error of (width + 8) u of
 * its absolute mean, plus the errors e of d. dw += d h. */
static void norm_row_backward(double *d, double *e, double *dw, double *bw, const double *x,
                              int width, double clip, double r, const double *w)
{
    double mean = 0, size = 0, carried = 0;
    for (int i = 0; i < width; i++) {
        double h = clamp(x[i], clip) * r;
        mean += d[i] * w[i] * h / width;
        size += fabs(d[i] * w[i] * h) / width;
        carried += e[i] * fabs(w[i] * h) / width;
        dw[i] += d[i] * h;
        bw[i] += e[i] * fabs(h) + (CHAIN + 4) * U24 * fabs(d[i] * h);
    }
    for (int i = 0; i < width; i++) {
        double h = clamp(x[i], clip) * r, g = d[i] * w[i];
        e[i] = r * (e[i] * fabs(w[i]) + 6 * U24 * (fabs(g) + fabs(h * mean)) +
                    fabs(h) * ((width + 8) * U24 * size + carried));
        d[i] = r * (g - h * mean);
    }
}

/* A case of RoPE: tensors, their values, and the stats given to backward. */
typedef struct {
    const FormatRow *f;
    const Shape *s;
    const RopeCase *k;
    Attention a;
    int N, Q, KW, S;      /* number of tokens; widths of q, of k and of a row */
    int q_norms, k_norms; /* number of equal ranges of q and k; each range has its norm */
    Tensor x, qw, kw, stats;
    double *X, *QW, *KN;
    float *table;
} Rope;

static Rope rope_setup(const FormatRow *f, const Shape *s, const RopeCase *k)
{
    Rope r = { .f = f,
               .s = s,
               .k = k,
               .a = attention_of(s),
               .N = s->B * s->T,
               .Q = s->H * s->D,
               .KW = s->K * s->D };
    const size_t table_bytes = sizeof *r.table * (size_t)(s->T * s->D);
    r.a.clip = k->clip;
    r.S = r.Q + 2 * r.KW;
    r.q_norms = k->norm == BY_HEAD ? s->H : 1, r.k_norms = k->norm == BY_HEAD ? s->K : 1;
    r.table = keep(table_bytes);
    device_get(r.table, r.a.rope, table_bytes);
    r.x = make_filled(f->act, r.N, r.S, 1, -1, 1);
    r.stats = make_f32(r.N, r.q_norms + r.k_norms);
    r.qw = k->norm ? make_filled(f->weight, 1, r.Q / r.q_norms, 2, 0.5f, 1.5f) : NONE;
    r.kw = k->norm ? make_filled(f->weight, 1, r.KW / r.k_norms, 3, 0.5f, 1.5f) : NONE;
    r.X = values(r.x), r.QW = values(r.qw), r.KN = values(r.kw);
    return r;
}

/* Norms q and k of one token, range by range; rstd: of the ranges. */
static void norm_token(const Rope *r, double *row, double *er, double *rstd)
{
    for (int i = 0; i < r->q_norms + r->k_norms; i++) {
        const bool q = i < r->q_norms;
        const int width = q ? r->Q / r->q_norms : r->KW / r->k_norms;
        rstd[i] = norm_row(row, er, width, q ? r->QW : r->KN, r->a.norm.eps);
        row += width, er += width;
    }
}

static void norm_token_backward(const Rope *r, double *row, double *er, double *dq, double *bq,
                                double *dk, double *bk, const double *from, const double *rstd)
{
    for (int i = 0; i < r->q_norms + r->k_norms; i++) {
        const bool q = i < r->q_norms;
        const int width = q ? r->Q / r->q_norms : r->KW / r->k_norms;
        norm_row_backward(row, er, q ? dq : dk, q ? bq : bk, from, width, r->k->clip, rstd[i],
                          q ? r->QW : r->KN);
        row += width, er += width, from += width;
    }
}

static void check_stats(const Rope *r, const double *rstd)
{
    double *bound = doubles(tensor_numel(r->stats));
    for (size_t i = 0; i < tensor_numel(r->stats); i++)
        bound[i] = (r->Q / r->q_norms / 2.0 + 6) * U24 * rstd[i];
    check(r->k->stats, r->f, r->s, r->stats, rstd, bound);
}

static void rope_forward_case(Rope *r)
{
    const int S = r->S, norms = r->q_norms + r->k_norms;
    const size_t n = (size_t)r->N * (size_t)S;
    double *ref = doubles(n), *e = doubles(n), *rstd = doubles(tensor_numel(r->stats));
    float *given = keep(tensor_numel(r->stats) * sizeof *given),
          *stats = r->k->norm ? r->stats.data : NULL;
    Tensor y = make(r->f->act, r->N, S), in_place = make_filled(r->f->act, r->N, S, 1, -1, 1);
    TWICE(rope_forward(y, r->x, stats, r->x, NO_PRODUCT, r->qw, r->kw, r->a, FROM_SAVED), y,
          r->stats);
    for (int t = 0; t < r->N; t++) {
        double *row = ref + t * S, *er = e + t * S;
        for (int i = 0; i < S; i++)
            row[i] = clamp(r->X[t * S + i], r->k->clip);
        if (r->k->norm)
            norm_token(r, row, er, rstd + t * norms);
        rotate(row, er, r->s->H + r->s->K, r->s->D, r->table + (t % r->s->T) * r->s->D, 1);
    }
    check(r->k->forward, r->f, r->s, y, ref, e);
    if (r->k->norm)
        check_stats(r, rstd);
    TWICE(rope_forward(in_place, in_place, stats, in_place, NO_PRODUCT, r->qw, r->kw, r->a,
                       FROM_SAVED),
          in_place);
    check_same_bytes("rope in place", tensor_snapshot(in_place), tensor_snapshot(y),
                     tensor_bytes(y));
    for (size_t i = 0; i < tensor_numel(r->stats); i++)
        given[i] = (float)rstd[i];
    put(r->stats, given); /* backward reads the same bits on both back ends */
}

/* A sum adds to the old value in F64. */
static double *sum_bound(Tensor old)
{
    const double *x = values(old);
    double *b = x ? doubles(tensor_numel(old)) : NULL;
    for (size_t i = 0; x && i < tensor_numel(old); i++)
        b[i] = 2 * U24 * fabs(x[i]);
    return b;
}

static void rope_backward_case(Rope *r)
{
    const int S = r->S, norms = r->q_norms + r->k_norms;
    const bool norm = r->k->norm;
    Tensor dy = make_filled(r->f->act, r->N, S, 6, -1, 1), dx = make(r->f->act, r->N, S);
    Tensor dqw = norm ? make_filled(r->f->grad, 1, r->Q / r->q_norms, 4, -1, 1) : NONE;
    Tensor dkw = norm ? make_filled(r->f->grad, 1, r->KW / r->k_norms, 5, -1, 1) : NONE;
    double *ref = values(dy), *e = doubles((size_t)r->N * (size_t)S), *dq = values(dqw),
           *dk = values(dkw);
    double *bq = sum_bound(dqw), *bk = sum_bound(dkw), *rstd = values(r->stats);
    const float *stats = norm ? r->stats.data : NULL;
    TWICE(rope_backward(dx, dqw, dkw, dy, r->x, stats, r->qw, r->kw, r->a), dx, dqw, dkw);
    for (int t = 0; t < r->N; t++) {
        double *row = ref + t * S, *er = e + t * S, *from = r->X + t * S;
        rotate(row, er, r->s->H + r->s->K, r->s->D, r->table + (t % r->s->T) * r->s->D, -1);
        if (norm)
            norm_token_backward(r, row, er, dq, bq, dk, bk, from, rstd + t * norms);
        for (int i = 0; i < S; i++)
            if (r->k->clip > 0 && fabs(from[i]) > r->k->clip)
                row[i] = er[i] = 0;
    }
    check(r->k->backward, r->f, r->s, dx, ref, e);
    if (norm) {
        check(r->k->dqnorm, r->f, r->s, dqw, dq, bq);
        check(r->k->dknorm, r->f, r->s, dkw, dk, bk);
    }
    EMPTY_IS_ZEROS(dqw, rope_backward(dx, dqw, dkw, dy, r->x, stats, r->qw, r->kw, r->a));
    EMPTY_IS_ZEROS(dkw, rope_backward(dx, dqw, dkw, dy, r->x, stats, r->qw, r->kw, r->a));
    TWICE(rope_backward(dy, NONE, NONE, dy, r->x, stats, r->qw, r->kw, r->a), dy);
    check_same_bytes("rope_backward in place", tensor_snapshot(dy), tensor_snapshot(dx),
                     tensor_bytes(dx));
}

static void rope_case(const FormatRow *f, const Shape *s, const RopeCase *k)
{
    Rope r = rope_setup(f, s, k);
    rope_forward_case(&r);
    rope_backward_case(&r);
    release();
}

TEST(test_rope)
{
    for (int f = 0; f < FORMAT_ROWS; f++)
        for (int i = 0; i < ROPE_CASES; i++) {
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
                rope_case(&format_rows[f], &shapes[s], &rope_cases[i]);
            for (size_t s = 0;
                 rope_cases[i].norm == BY_HEAD && s < sizeof head_shapes / sizeof head_shapes[0];
                 s++)
                rope_case(&format_rows[f], &head_shapes[s], &rope_cases[i]);
        }
}

TEST(test_errors)
{
    const Shape s = { "errors", 2, 8, 4, 2, 64 };
    Attention a = attention_of(&s);
    const Format f = { F32, 0 };
    Tensor qkv = make(f, 16, 512), y = make(f, 16, 256), stats = make_f32(16, 6);
    Tensor q = make(f, 1, 256), k = make(f, 1, 128), head = make(f, 1, 64);
    DIES("rope_forward: qkv is (16, 256); expected (16, 512)",
         rope_forward(qkv, y, NULL, y, NO_PRODUCT, NONE, NONE, a, FROM_SAVED));
    DIES("rope_forward: y is (16, 256)",
         rope_forward(y, qkv, NULL, qkv, NO_PRODUCT, NONE, NONE, a, FROM_SAVED));
    DIES("knorm is (1, 256); expected (1, 128)",
         rope_forward(qkv, qkv, stats.data, qkv, NO_PRODUCT, q, q, a, FROM_SAVED));
    DIES("knorm is (1, 128); expected (1, 64)",
         rope_forward(qkv, qkv, stats.data, qkv, NO_PRODUCT, head, k, a, FROM_SAVED));
    DIES("qnorm is (1, 128); expected (1, 256) for q as a whole or (1, 64) for each head",
         rope_forward(qkv, qkv, stats.data, qkv, NO_PRODUCT, k, k, a, FROM_SAVED));
    DIES("dknorm is (1, 128); expected (1, 64)",
         rope_backward(qkv, head, k, qkv, qkv, stats.data, head, head, a));
    DIES("only one of q and k has a norm",
         rope_forward(qkv, qkv, stats.data, qkv, NO_PRODUCT, q, NONE, a, FROM_SAVED));
    a.K = 3;
    DIES("3 key/value heads",
         rope_forward(qkv, qkv, NULL, qkv, NO_PRODUCT, NONE, NONE, a, FROM_SAVED));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
