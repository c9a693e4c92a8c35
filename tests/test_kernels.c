/* Compares norms, linear layers, embedding, SwiGLU and loss with a double reference. A comment
 * derives each bound.
 *
 * u = 2^-24. A sum of n terms, in any order, has an error of at most n u sum|terms|; a factor of 2
 * covers tensor cores, which truncate instead of rounding. Elementwise F32 functions have errors of
 * at most 4 u (CUDA's expf and rsqrtf: 2 ulp). Each operation runs twice, for each row of formats,
 * on odd (for the CPU only), small and medium shapes. */
#include "tests/test.h"
#include "tests/golden.h"
#include "tests/loss.h"
#include "tests/norm.h"

#define MAX2(a, b) ((a) > (b) ? (a) : (b))

typedef struct {
    int N, C, O;
    bool odd;
} Shape;
static const Shape shapes[] = { { 1, 7, 3, true },
                                { 5, 13, 9, true },
                                { 1, 64, 32, false },
                                { 6, 40, 24, false },
                                { 96, 256, 384, false } };
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static char label[128];
static const char *name(const char *op, const FormatRow *f, const Shape *s, const char *variant)
{
    snprintf(label, sizeof label, "%s/%s/%dx%dx%d%s", op, f->name, s->N, s->C, s->O, variant);
    return label;
}

static void check(const char *op, const FormatRow *f, const Shape *s, const char *variant, Tensor t,
                  const double *ref, const double *bound)
{
    check_close(name(op, f, s, variant), t, ref, bound);
    golden_check(label, t, bound);
}

static void for_all(void (*test)(const FormatRow *, const Shape *))
{
    for (int f = 0; f < FORMAT_ROWS; f++)
        for (int s = 0; s < SHAPES; s++)
            if (on_cpu() || !shapes[s].odd) {
                test(&format_rows[f], &shapes[s]);
                release();
            }
}

static double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

/* ---- norms ----------------------------------------------------------------------------------- */

typedef struct {
    NormKind kind;
    bool weight, residual, accumulate;
    const char *text;
} NormCase;
// clang-format off
static const NormCase norm_cases[] = {
    { RMS_NORM,   true,  false, true,  "-rms" },        { RMS_NORM,   false, true,  false, "-rms-plain-residual" },
    { LAYER_NORM, true,  true,  false, "-layer-residual" }, { LAYER_NORM, false, false, true, "-layer-plain" },
};
// clang-format on

static void norm_forward_case(const FormatRow *f, const Shape *s, const NormCase *k,
                              bool saved_apart)
{
    const int N = s->N, C = s->C;
    const size_t n = (size_t)N * (size_t)C;
    const Norm norm = { k->kind, 1e-5f };
    Tensor stream = make_filled(f->act, N, C, 1, -1, 2),
           x = saved_apart ? make(f->act, N, C) : stream;
    Tensor w = k->weight ? make_filled(f->weight, 1, C, 2, 0.5f, 1.5f) : NONE;
    Tensor residual = k->residual ? make_filled(f->act, N, C, 3, -1, 1) : NONE;
    Tensor y = make(f->act, N, C), stats = make_f32(N, 2);
    TWICE(norm_forward(y, x, stats.data, stream, w, residual, norm, FROM_SAVED), y, x, stats);
    check_same_bytes("the saved norm input", tensor_snapshot(x), tensor_snapshot(stream),
                     tensor_bytes(x));

    double *ref = doubles(n), *bound = doubles(n), *ref_stats = doubles(2 * (size_t)N),
           *bs = doubles(2 * (size_t)N);
    norm_reference(ref, bound, ref_stats, bs, values(stream), values(w), values(residual), N, C,
                   norm);
    check(saved_apart ? "norm_forward_apart" : "norm_forward", f, s, k->text, y, ref, bound);
    check(saved_apart ? "norm_stats_apart" : "norm_stats", f, s, k->text, stats, ref_stats, bs);
}

static void norm_backward_case(const FormatRow *f, const Shape *s, const NormCase *k, bool in_place)
{
    const int N = s->N, C = s->C;
    const size_t n = (size_t)N * (size_t)C;
    const Norm norm = { k->kind, 1e-5f };
    const bool accumulate = k->accumulate && !in_place;
    Tensor x = make_filled(f->act, N, C, 1, -1, 2), dy = make_filled(f->act, N, C, 4, -1, 1);
    Tensor w = k->weight ? make_filled(f->weight, 1, C, 2, 0.5f, 1.5f) : NONE;
    Tensor dw = k->weight ? make_filled(f->grad, 1, C, 5, -1, 1) : NONE;
    Tensor dx = in_place ? dy : make_filled(f->act, N, C, 6, -1, 1), stats = make_f32(N, 2);
    double *X = values(x), *DY = values(dy), *W = values(w), *old_dx = values(dx),
           *old_dw = values(dw);
    float *given = keep(2 * sizeof *given * (size_t)N);
    double *ref = doubles(n), *bound = doubles(n), *dw_ref = doubles((size_t)C),
           *dw_bound = doubles((size_t)C);
    for (int i = 0; i < N; i++) {
        Stats t = row_stats(X + i * C, C, norm);
        given[2 * i] = (float)t.mean, given[2 * i + 1] = (float)t.rstd;
    }
    put(stats, given);
    TWICE(norm_backward(dx, NULL, dw, dy, x, stats.data, w, norm, accumulate), dx, dw);

    for (int c = 0; old_dw && c < C; c++)
        dw_ref[c] = old_dw[c], dw_bound[c] = (N + 4) * U24 * fabs(old_dw[c]);
    for (int i = 0; i < N; i++) {
        norm_backward_row(ref + i * C, bound + i * C, dw_ref, dw_bound, DY + i * C, X + i * C,
                          (double[]){ given[2 * i], given[2 * i + 1] }, W,
                          accumulate ? old_dx + i * C : NULL, N, C, norm.kind);
    }
    check(in_place ? "norm_backward_in_place" : "norm_backward", f, s, k->text, dx, ref, bound);
    if (dw.data)
        check(in_place ? "norm_dw_in_place" : "norm_dw", f, s, k->text, dw, dw_ref, dw_bound);
    if (!in_place)
        EMPTY_IS_ZEROS(dw, norm_backward(dx, NULL, dw, dy, x, stats.data, w, norm, false));
}

static void norm_cases_of(const FormatRow *f, const Shape *s)
{
    for (size_t i = 0; i < sizeof norm_cases / sizeof norm_cases[0]; i++) {
        for (int variant = 0; variant < 2; variant++) {
            norm_forward_case(f, s, &norm_cases[i], variant);
            norm_backward_case(f, s, &norm_cases[i], variant);
            release();
        }
    }
}

TEST(test_norm)
{
    for_all(norm_cases_of);
}

/* ---- linear ---------------------------------------------------------------------------------- */

typedef struct {
    const double *x;
    int outer, inner;
} Strided;

/* y (rows, cols) = old + sum over i of a(r,i) b(c,i). Strides address each matrix; terms =
 * sum|a||b| + |old|. In BF16 (f: y's format) cuBLASLt may round the product before it adds the old
 * value and rounds again, as it does for a single row. The CPU rounds once. */
static void product(double *y, double *bound, const double *old, Format f, int rows, int cols,
                    int sum, Strided a, Strided b)
{
    const double rounding = old && f.dtype == BF16 && !on_cpu() ? unit_roundoff(f) : 0;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            double before = old ? old[r * cols + c] : 0, total = 0, terms = fabs(before);
            for (int i = 0; i < sum; i++) {
                double p = a.x[r * a.outer + i * a.inner] * b.x[c * b.outer + i * b.inner];
                total += p, terms += fabs(p);
            }
            y[r * cols + c] = before + total;
            bound[r * cols + c] = 2 * (sum + 2) * U24 * terms + rounding * fabs(total);
        }
}

/* y = x wT + bias, rounded once on both back ends, and the gradient of the bias. */
static void bias_cases(const FormatRow *f, const Shape *s)
{
    const int N = s->N, C = s->C, O = s->O;
    const size_t most = (size_t)MAX2(N, O) * (size_t)O;
    Tensor x = make_filled(f->act, N, C, 1, -1, 1), w = make_filled(f->weight, O, C, 2, -1, 1),
           y = make(f->act, N, O);
    Tensor bias = make_filled(f->act, O, 1, 7, -8, 8), dy = make_filled(f->act, N, O, 4, -1, 1);
    Tensor db = make_filled(f->grad, O, 1, 8, -8, 8);
    double *X = values(x), *W = values(w), *added = values(bias), *old = values(db), one = 1;
    double *ref = doubles(most), *bound = doubles(most);

    TWICE(matmul(y, x, w, bias), y);
    product(ref, bound, NULL, f->act, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    for (int i = 0; i < N * O; i++) {
        ref[i] += added[i % O];
        bound[i] += 2 * (C + 2) * U24 * fabs(added[i % O]);
    }
    check("matmul", f, s, "-bias", y, ref, bound);

    TWICE(matmul_db(db, dy), db);
    product(ref, bound, old, f->grad, O, 1, N, (Strided){ values(dy), 1, O },
            (Strided){ &one, 0, 0 });
    check("matmul_db", f, s, "", db, ref, bound);
    EMPTY_IS_ZEROS(db, matmul_db(db, dy));
}

static void matmul_cases(const FormatRow *f, const Shape *s)
{
    const int N = s->N, C = s->C, O = s->O;
    const size_t most = (size_t)MAX2(N, O) * (size_t)MAX2(C, O);
    Tensor x = make_filled(f->act, N, C, 1, -1, 1), w = make_filled(f->weight, O, C, 2, -1, 1);
    Tensor add = make_filled(f->act, N, O, 3, -8, 8), dy = make_filled(f->act, N, O, 4, -1, 1);
    Tensor y = make(f->act, N, O), dx = make_filled(f->act, N, C, 5, -8, 8);
    Tensor dw = make_filled(f->grad, O, C, 6, -8, 8);
    double *X = values(x), *W = values(w), *DY = values(dy), *ref = doubles(most),
           *bound = doubles(most);

    TWICE(matmul(y, x, w, NONE), y);
    product(ref, bound, NULL, f->act, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check("matmul", f, s, "", y, ref, bound);
    TWICE(matmul(y, x, w, add), y);
    product(ref, bound, values(add), f->act, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check("matmul", f, s, "-add", y, ref, bound);
    TWICE(matmul(add, x, w, add), add);
    check("matmul", f, s, "-add-in-place", add, ref, bound);

    double *old = values(dx);
    TWICE(matmul_dx(dx, dy, w, true), dx);
    product(ref, bound, old, f->act, N, C, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    check("matmul_dx", f, s, "-accumulate", dx, ref, bound);
    TWICE(matmul_dx(dx, dy, w, false), dx);
    product(ref, bound, NULL, f->act, N, C, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    check("matmul_dx", f, s, "", dx, ref, bound);

    old = values(dw);
    TWICE(matmul_dw(dw, dy, x), dw);
    product(ref, bound, old, f->grad, O, C, N, (Strided){ DY, 1, O }, (Strided){ X, 1, C });
    check("matmul_dw", f, s, "", dw, ref, bound);
    EMPTY_IS_ZEROS(dw, matmul_dw(dw, dy, x));
}

TEST(test_matmul)
{
    for_all(matmul_cases);
    for_all(bias_cases);
}

/* ---- embedding ------------------------------------------------------------------------------- */

static void embedding_cases(const FormatRow *f, const Shape *s)
{
    const int N = s->N, C = s->C, V = s->O;
    const size_t n = (size_t)V * (size_t)C;
    Tensor w = make_filled(f->weight, V, C, 1, -1, 1), y = make(f->act, N, C);
    Tensor dy = make_filled(f->act, N, C, 2, -1, 1), dw = make_filled(f->grad, V, C, 3, -1, 1);
    int *token = keep(sizeof *token * (size_t)N);
    for (int i = 0; i < N; i++) /* half of the tokens are equal; some never occur */
        token[i] = i % 2 ? V - 1 : (int)(random_bits(7, (uint64_t)i) % (uint64_t)V);
    const TokenAt *sorted = put_sorted(token, N, V);
    double *W = values(w), *DY = values(dy), *ref = values(dw), *bound = doubles(n);
    double *exact = doubles((size_t)(N * C));

    TWICE(embedding_forward(y, sorted, w), y);
    for (int i = 0; i < N; i++)
        memcpy(exact + i * C, W + token[i] * C, sizeof *exact * (size_t)C);
    check_close("embedding_forward", y, exact, doubles((size_t)(N * C)));
    golden_check(name("embedding_forward", f, s, ""), y, NULL);

    TWICE(embedding_backward(dw, sorted, dy), dw);
    int *count = keep(sizeof *count * (size_t)V);
    for (size_t i = 0; i < n; i++)
        bound[i] = fabs(ref[i]);
    for (int i = 0; i < N; i++) {
        count[token[i]]++;
        for (int c = 0; c < C; c++) {
            ref[token[i] * C + c] += DY[i * C + c];
            bound[token[i] * C + c] += fabs(DY[i * C + c]);
        }
    }
    for (size_t i = 0; i < n; i++)
        bound[i] *= count[i / (size_t)C] * U24;
    check("embedding_backward", f, s, "", dw, ref, bound);
    EMPTY_IS_ZEROS(dw, embedding_backward(dw, sorted, dy));
}

TEST(test_embedding)
{
    for_all(embedding_cases);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

/* Relative errors: s = 1/(1+exp(-g)) has 6 u, and g s u has 8 u. 1 - s has an absolute error of 7 u
 * s, so s (1 + g (1-s)) has an error of 16 u s (1 + |g|). The gates reach -100, where exp(-g)
 * overflows F32 and act is 0 instead of 1e-42. */
static void swiglu_cases(const FormatRow *f, const Shape *s)
{
    const int N = s->N, F = s->C;
    const size_t n = (size_t)N * (size_t)F;
    Tensor wide = make_filled(f->act, N, 2 * F, 1, -4, 4),
           dact = make_filled(f->act, N, F, 2, -1, 1);
    Tensor act = make(f->act, N, F), dwide = make(f->act, N, 2 * F);
    device_put(wide.data,
               f->act.dtype == F32 ? (const void *)&(float){ -100 } : &(uint16_t){ 0xc2c8 },
               dtype_size(f->act.dtype));
    double *W = values(wide), *D = values(dact);
    double *ref = doubles(n), *bound = doubles(n), *dref = doubles(2 * n), *dbound = doubles(2 * n);
    for (int r = 0; r < N; r++)
        for (int c = 0; c < F; c++) {
            int i = r * F + c, gate = 2 * r * F + c, up = gate + F;
            double g = W[gate], u = W[up], sg = 1 / (1 + exp(-g));
            ref[i] = g * sg * u;
            bound[i] = 12 * U24 * fabs(ref[i]) + 1e-36;
            dref[gate] = D[i] * u * sg * (1 + g * (1 - sg));
            dref[up] = D[i] * g * sg;
            dbound[gate] = 16 * U24 * fabs(D[i] * u) * sg * (1 + fabs(g)) + 1e-36;
            dbound[up] = 12 * U24 * fabs(dref[up]) + 1e-36;
        }
    TWICE(swiglu_forward(act, wide, wide, NO_PRODUCT, FROM_SAVED), act);
    check("swiglu_forward", f, s, "", act, ref, bound);
    TWICE(swiglu_backward(dwide, NONE, dact, NO_PRODUCT, wide), dwide);
    check("swiglu_backward", f, s, "", dwide, dref, dbound);
    Tensor recomputed = make(f->act, N, F);
    TWICE(swiglu_backward(dwide, recomputed, dact, NO_PRODUCT, wide), dwide, recomputed);
    check("swiglu_backward", f, s, "-again", dwide, dref, dbound);
    check_same_bytes("act written again", tensor_snapshot(recomputed), tensor_snapshot(act),
                     tensor_bytes(act));
    TWICE(swiglu_backward(wide, dact, dact, NO_PRODUCT, wide), wide, dact);
    check("swiglu_backward", f, s, "-in-place", wide, dref, dbound);
    check_same_bytes("act over dact", tensor_snapshot(dact), tensor_snapshot(act),
                     tensor_bytes(act));
}

TEST(test_swiglu)
{
    for_all(swiglu_cases);
}

/* ---- loss ------------------------------------------------------------------------------------ */

static void loss_cases(const FormatRow *f, const Shape *s)
{
    const int N = s->N, V = s->C, vocab = V - 3;
    const float temperature = N % 2 ? 0.7f : 1, scale = 0.125f, weight = 1e-2f;
    Tensor logits = make_filled(f->act, N, V, 1, -9, 9), loss = make_f32(1, N),
           zloss = make_f32(1, N);
    int *target = keep(sizeof *target * (size_t)N);
    for (int i = 0; i < N; i++)
        target[i] = i % 4 == 2 ? -1 : (int)(random_bits(8, (uint64_t)i) % (uint64_t)vocab);
    int *targets = put_ints(target, (size_t)N);
    void *untouched = tensor_snapshot(logits);
    const Loss l = loss_reference(values(logits), target, N, vocab, V, temperature, scale, weight);

    TWICE(cross_entropy(logits, loss.data, zloss.data, targets, NULL, vocab, temperature, scale,
                        weight, false),
          logits, loss, zloss);
    check_same_bytes("logits without backward", tensor_snapshot(logits), untouched,
                     tensor_bytes(logits));
    check("loss", f, s, "", loss, l.loss, l.loss_bound);
    check("zloss", f, s, "", zloss, l.zloss, l.zloss_bound);
    TWICE(cross_entropy(logits, loss.data, zloss.data, targets, NULL, vocab, temperature, scale,
                        weight, true),
          logits, loss, zloss);
    check("loss", f, s, "-backward", loss, l.loss, l.loss_bound);
    check("dlogits", f, s, "", logits, l.grad, l.grad_bound);
    double *y = values(logits);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < V; j++)
            if ((target[i] < 0 || j >= vocab) && y[i * V + j] != 0)
                fail_msg("dlogits[%d,%d] is %g in a masked row or beyond the vocabulary", i, j,
                         y[i * V + j]);
}

TEST(test_loss)
{
    for_all(loss_cases);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
