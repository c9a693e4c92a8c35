/* Compares GPTQ of a layer with its published form in double precision, which inverts H. Also H =
 * 1, and H without a Cholesky factor. */
#include "kernels/gptq_layer.h"
#include "model/checkpoint/weight_codes.h"
#include "tests/test.h"
#include "tests/kit.h"

/* A layer and its inputs. In double precision, h includes the damping, and its rows and columns are
 * in the chosen order. */
typedef struct {
    int O, I, group;
    float *w, *scale;
    Tensor device_w, device_h, values;
    float *device_scale;
    int8_t *device_codes, *codes;
    int *order;
    double *h;
} LinearCase;

static Format f32 = { F32, 0 }, bf16 = { BF16, 0 };

static size_t column(const LinearCase *a, int j)
{
    return (size_t)a->order[j];
}

static double scale_of(const LinearCase *a, int row, int j)
{
    return (double)
        a->scale[(size_t)row * (size_t)(a->I / a->group) + column(a, j) / (size_t)a->group];
}

static double weight_of(const LinearCase *a, int row, int j)
{
    return (double)a->w[(size_t)row * (size_t)a->I + column(a, j)];
}

static int code_of(const LinearCase *a, int row, int j)
{
    return a->codes[(size_t)row * (size_t)a->I + column(a, j)];
}

static void make_weights(LinearCase *a, int O, int I, int group)
{
    *a = (LinearCase){ .O = O, .I = I, .group = group };
    const size_t n = (size_t)O * (size_t)I, groups = n / (size_t)group;
    a->w = keep(n * sizeof(float)), a->scale = keep(groups * sizeof(float));
    a->codes = keep(n), a->order = keep((size_t)I * sizeof(int)),
    a->h = keep((size_t)I * (size_t)I * sizeof(double));
    for (size_t i = 0; i < n; i++)
        a->w[i] = uniform(11, i, -1, 1) * uniform(12, i, 0, 1);
    codes_int4_scales(a->scale, a->w, (size_t)O, (size_t)I, (size_t)group);
    a->device_w = make(f32, O, I), a->device_h = make(f32, I, I), a->values = make(bf16, O, I);
    put(a->device_w, a->w);
    a->device_codes = guarded(n), a->device_scale = guarded(groups * sizeof(float));
    device_put(a->device_scale, a->scale, groups * sizeof(float));
}

/* Makes H as a trainer sums it, from correlated BF16 inputs of different sizes. Inputs from `count`
 * on are 0. */
static void make_inputs(LinearCase *a, int count)
{
    const int n = 4 * a->I;
    float *x = keep((size_t)n * (size_t)a->I * sizeof(float));
    for (int row = 0; row < n; row++)
        for (int i = 0; i < count; i++)
            x[row * a->I + i] = (uniform(21, (size_t)(row * a->I + i), -1, 1) +
                                 0.2f * uniform(22, (size_t)row, -1, 1)) *
                                uniform(23, (size_t)i, 0.5f, 1);
    Tensor inputs = make(bf16, n, a->I);
    put(inputs, x);
    a->device_h.empty = true;
    matmul_dw(a->device_h, inputs, inputs);
    a->device_h.empty = false;
}

static GptqResult run(LinearCase *a, double damping, bool ordered)
{
    const size_t n = (size_t)a->O * (size_t)a->I;
    const GptqResult r = gptq(a->device_codes, a->values, a->device_w, a->device_scale, a->group,
                              a->device_h, damping, ordered);
    device_get(a->codes, a->device_codes, n);
    const double *h = values(a->device_h);
    double mean = 0;
    for (int i = 0; i < a->I; i++) {
        mean += h[i * a->I + i] / a->I;
        a->order[i] = i;
    }
    for (int i = 1; i < a->I && ordered; i++) /* inputs of equal size keep their order */
        for (int j = i; j > 0 && h[a->order[j] * (a->I + 1)] > h[a->order[j - 1] * (a->I + 1)];
             j--) {
            const int other = a->order[j];
            a->order[j] = a->order[j - 1], a->order[j - 1] = other;
        }
    for (int i = 0; i < a->I; i++)
        for (int j = 0; j < a->I; j++)
            a->h[i * a->I + j] =
                h[a->order[i] * a->I + a->order[j]] + (i == j ? r.damping * mean : 0);
    const double *found = values(a->values);
    for (int row = 0; row < a->O; row++)
        for (int j = 0; j < a->I; j++) {
            const double value = code_of(a, row, j) * scale_of(a, row, j);
            assert_true(code_of(a, row, j) >= -8 && code_of(a, row, j) <= 7);
            if (!(fabs(found[(size_t)row * (size_t)a->I + column(a, j)] - value) <=
                  0x1p-8 * fabs(value)))
                fail_msg("a value that is not scale * code");
        }
    return r;
}

/* ---- the published form ---------------------------------------------------------------------- */

/* Returns the lower triangular l with a = l l^T. */
static void cholesky(double *l, const double *a, int n)
{
    memset(l, 0, (size_t)n * (size_t)n * sizeof *l);
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            double sum = a[i * n + j];
            for (int k = 0; k < j; k++)
                sum -= l[i * n + k] * l[j * n + k];
            l[i * n + j] = i == j ? sqrt(sum) : sum / l[j * n + j];
        }
}

static void invert(double *to, const double *a, int n)
{
    double *l = keep((size_t)n * (size_t)n * sizeof *l), *x = keep((size_t)n * sizeof *x);
    cholesky(l, a, n);
    for (int col = 0; col < n; col++) {
        for (int i = 0; i < n; i++) {
            x[i] = i == col;
            for (int k = 0; k < i; k++)
                x[i] -= l[i * n + k] * x[k];
            x[i] /= l[i * n + i];
        }
        for (int i = n - 1; i >= 0; i--) {
            for (int k = i + 1; k < n; k++)
                x[i] -= l[k * n + i] * x[k];
            x[i] /= l[i * n + i];
        }
        for (int i = 0; i < n; i++)
            to[i * n + col] = x[i];
    }
}

static double norm_of(const double *a, int n)
{
    double most = 0;
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < n; j++)
            sum += fabs(a[i * n + j]);
        most = fmax(most, sum);
    }
    return most;
}

/* [Frantar et al. 2022, algorithm 1] with B = 1. From some weight on, a row may differ, but only if
 * this weight is at the midpoint of two codes, within rounding errors of F32: errors of a factor
 * and of sums of I terms, amplified by the condition of H. Returns the number of such rows. */
static int count_parted(const LinearCase *a)
{
    const int I = a->I;
    double *inverse = keep((size_t)I * (size_t)I * sizeof *inverse),
           *l = keep((size_t)I * (size_t)I * sizeof *l);
    double *w = keep((size_t)I * sizeof *w);
    invert(inverse, a->h, I);
    cholesky(l, inverse, I);
    const double bound = 2 * I * U24 * norm_of(a->h, I) * norm_of(inverse, I);
    int parted = 0;
    assert_true(bound < 0.1);
    for (int row = 0; row < a->O; row++) {
        for (int j = 0; j < I; j++)
            w[j] = weight_of(a, row, j);
        for (int j = 0; j < I; j++) {
            const double s = scale_of(a, row, j), t = w[j] / s,
                         code = fmax(-8, fmin(7, nearbyint(t)));
            if (code != code_of(a, row, j)) {
                if (fabs(code - code_of(a, row, j)) != 1 ||
                    !(0.5 - fabs(t - nearbyint(t)) <= bound))
                    fail_msg("row %d, column %d: code %d, expected that of %.9g; %.3g is explained",
                             row, j, code_of(a, row, j), t, bound);
                parted++;
                break;
            }
            for (int k = j + 1; k < I; k++)
                w[k] -= (w[j] - code * s) / l[j * I + j] * l[k * I + j];
        }
    }
    return parted;
}

/* Returns the error of the outputs. to_nearest: with codes from rounding to nearest. */
static double output_error(const LinearCase *a, bool to_nearest)
{
    double *e = keep((size_t)a->I * sizeof *e), total = 0;
    for (int row = 0; row < a->O; row++) {
        for (int j = 0; j < a->I; j++) {
            const double s = scale_of(a, row, j),
                         nearest = fmax(-8, fmin(7, nearbyint(weight_of(a, row, j) / s)));
            e[j] = weight_of(a, row, j) - s * (to_nearest ? nearest : code_of(a, row, j));
        }
        for (int i = 0; i < a->I; i++)
            for (int j = 0; j < a->I; j++)
                total += e[i] * a->h[i * a->I + j] * e[j];
    }
    return total;
}

/* The codes are those of codes_int4. */
static void check_nearest(const LinearCase *a)
{
    int8_t *nearest = keep((size_t)a->O * (size_t)a->I);
    codes_int4(nearest, a->scale, a->w, (size_t)a->O, (size_t)a->I, (size_t)a->group);
    assert_memory_equal(a->codes, nearest, (size_t)a->O * (size_t)a->I);
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* NOTE: |e C|^2 is computed from F32 sums of I terms, so its error is some I units of roundoff. */
TEST(test_published)
{
    static const struct {
        int O, I, group;
        bool ordered;
        double damping;
    } cases[] = {
        { 40, 32, 32, false, 0.01 }, { 40, 128, 128, false, 0.01 }, { 40, 128, 32, true, 0.01 },
        { 33, 160, 32, true, 0.01 }, { 70, 320, 64, false, 0.001 }, { 70, 320, 64, true, 0.1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        LinearCase a;
        make_weights(&a, cases[i].O, cases[i].I, cases[i].group);
        make_inputs(&a, a.I);
        const GptqResult r = run(&a, cases[i].damping, cases[i].ordered);
        assert_true(r.damping == cases[i].damping);
        assert_true(count_parted(&a) <= a.O / 8);
        assert_true(fabs(r.error / output_error(&a, false) - 1) <= 8 * a.I * U24);
        assert_true(fabs(r.rounded / output_error(&a, true) - 1) <= 8 * a.I * U24);
        assert_true(r.error < 0.95 * r.rounded);
        release();
    }
}

static void put_h(const LinearCase *a, double diagonal, double off_diagonal)
{
    float *h = keep((size_t)a->I * (size_t)a->I * sizeof *h);
    for (int i = 0; i < a->I * a->I; i++)
        h[i] = (float)(i / a->I == i % a->I ? diagonal : off_diagonal);
    put(a->device_h, h);
}

/* Uncorrelated inputs: no codes are better than rounding to nearest. */
TEST(test_identity)
{
    for (int ordered = 0; ordered < 2; ordered++) {
        LinearCase a;
        make_weights(&a, 37, 160, 32);
        put_h(&a, 3, 0);
        const GptqResult r = run(&a, 0.01, ordered);
        check_nearest(&a);
        assert_true(r.damping == 0.01 && r.error == r.rounded);
        release();
    }
}

/* An H that no damping makes positive definite, and an H that needs ten times the damping. With 1
 * on the diagonal and b elsewhere, the smallest eigenvalue is 1 - (I - 1) |b| for b < 0. */
TEST(test_no_factor)
{
    static const struct {
        double diagonal, off_diagonal, damping;
    } cases[] = {
        { 0, 0, 0 },           { NAN, 0, 0 },         { 1, INFINITY, 0 },      { 1, NAN, 0 },
        { -1, 0, 0 },          { 1, -12.0 / 159, 0 }, { 1, -1.05 / 159, 0.1 }, { 1, -1.5 / 159, 1 },
        { 1, -3.0 / 159, 10 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        LinearCase a;
        make_weights(&a, 20, 160, 32);
        put_h(&a, cases[i].diagonal, cases[i].off_diagonal);
        const GptqResult r = run(&a, 0.01, true);
        assert_true(fabs(r.damping - cases[i].damping) <= 1e-6);
        assert_true(isnan(r.error) == (cases[i].damping == 0) &&
                    isnan(r.rounded) == (cases[i].damping == 0));
        if (cases[i].damping == 0)
            check_nearest(&a);
        release();
    }
}

/* Inputs that were always 0: their columns are rounded to nearest, and do not affect other
 * columns. */
TEST(test_dead)
{
    LinearCase a;
    make_weights(&a, 20, 160, 32);
    make_inputs(&a, 130);
    const GptqResult r = run(&a, 0.01, true);
    assert_true(r.error < r.rounded && count_parted(&a) <= a.O / 8);
    int8_t *nearest = keep((size_t)a.O * 160);
    codes_int4(nearest, a.scale, a.w, (size_t)a.O, 160, 32);
    for (int row = 0; row < a.O; row++)
        assert_memory_equal(a.codes + row * 160 + 130, nearest + row * 160 + 130, 30);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
