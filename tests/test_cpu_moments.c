/* FP8 moments of AdamW, with and without dynamic range expansion [COAT, sec. 4]: scales, exponents, and what comes
 * back. Seen through adamw() alone; the CUDA back end has only F32 and BF16 moments. */
#include "tests/kit.h"

static const Format F = { F32, 0 };
enum { GROUP = 128 };

static Tensor make_moment(DType d, int n, bool expand)
{
    return make((Format){ d, GROUP, expand }, 1, n);
}

/* Values as optimizers make them: sizes spread over `decades` powers of ten, different from group to group. */
static Tensor make_spread(int n, double decades, bool positive)
{
    Tensor t = make(F, 1, n);
    float *x = keep((size_t)n * sizeof *x);
    for (int i = 0; i < n; i++) {
        double size = pow(10, -4 - i / GROUP % 5 - decades * uniform(21, (size_t)i, 0, 1));
        x[i] = (float)(positive || i % 2 ? size : -size);
    }
    put(t, x);
    return t;
}

/* With beta1 = 0 the moment that is stored is the gradient; with beta1 = 1, grad = 0, v = 0, eps = 1, lr = 1 and
 * w = 0 the new w is minus the moment as read back. pairs, if any: the scales as first stored. */
static double *through_moment(Tensor m, Tensor x, uint16_t *pairs)
{
    const int n = x.cols;
    AdamW a = { .lr = 0, .beta1 = 0, .beta2 = 1, .eps = 1, .correction1 = 1, .correction2 = 1, .grad_scale = 1 };
    Tensor w = make_filled(F, 1, n, 0, 0, 0), v = make_filled(F, 1, n, 0, 0, 0), zero = make_filled(F, 1, n, 0, 0, 0);
    adamw(w, m, v, x, a, 0);
    if (pairs)
        device_get(pairs, m.scale, 2 * sizeof *pairs * (size_t)(n / GROUP));
    a.beta1 = 1, a.lr = 1;
    adamw(w, m, v, zero, a, 0);
    double *back = values(w);
    for (int i = 0; i < n; i++)
        back[i] = -back[i];
    return back;
}

/* f(x) = (|x|/a)^k max is stored to nearest, so it errs by 2^-4 f (2^-3 for E5M2) or half the smallest code, and a
 * hair for powf; x comes back by the inverse of f, which is monotonic: it lies between the images of f -+ that. */
static void check_expansion(DType d, double decades)
{
    enum { N = 20 * GROUP };
    const double max = d == E4M3 ? 448 : 57344, smallest = d == E4M3 ? 0x1p-9 : 0x1p-16;
    const double u = unit_roundoff((Format){ d, GROUP });
    Tensor x = make_spread(N, decades, false), m = make_moment(d, N, true);
    uint16_t scale[2 * N / GROUP];
    const double *X = values(x), *back = through_moment(m, x, scale);
    for (int i = 0; i < N; i++) {
        double top = 0, low = INFINITY;
        for (int j = i / GROUP * GROUP; j < (i / GROUP + 1) * GROUP; j++)
            top = fmax(top, fabs(X[j])), low = fmin(low, fabs(X[j]));
        double S = float_from_bits((uint32_t)scale[i / GROUP * 2] << 16), a = S * max;
        double k = float_from_bits((uint32_t)scale[i / GROUP * 2 + 1] << 16);
        assert_true(a >= top * (1 - 0x1p-23) && a <= top * (1 + 0x1p-7));
        double exact = floor(log2(max * max / 2) / log2((top + 1e-20) / (low + 1e-20)) * 16) / 16;
        assert_true(k == fmin(fmax(exact, 1.0 / 16), 16));
        double f = pow(fabs(X[i]) / a, k) * max, err = fmax(u * f, smallest / 2) + 1e-4 * f;
        double least = a * pow(fmax(f - err, 0) / max, 1 / k), most = a * pow((f + err) / max, 1 / k);
        if (!(fabs(back[i]) >= least * (1 - 1e-4) && fabs(back[i]) <= most * (1 + 1e-4))
            || (back[i] != 0 && signbit(back[i]) != signbit(X[i])))
            fail_msg("moment %d: %g comes back as %g, expected %g .. %g with k = %g", i, X[i], back[i], least, most,
                     k);
    }
    release();
}

static void test_expansion(void **state)
{
    (void)state;
    for (DType d = E4M3; d <= E5M2; d++) {
        check_expansion(d, 0.1);
        check_expansion(d, 2);
        check_expansion(d, 6);
        check_expansion(d, 12);
    }
}

/* Without expansion a moment is any grouped FP8 tensor. Zeros stay zeros with and without. */
static void test_fp8_moments(void **state)
{
    (void)state;
    enum { N = 64 * GROUP };
    Tensor x = make_spread(N, 3, false), m = make_moment(E4M3, N, false), y = make_moment(E4M3, N, false);
    const double *back = through_moment(m, x, NULL), *expected;
    quantize(y, x);
    expected = values(y);
    for (int i = 0; i < N; i++)
        assert_true(back[i] == (double)(float)expected[i]);
    for (int expand = 0; expand < 2; expand++) {
        back = through_moment(make_moment(E4M3, N, expand), make_filled(F, 1, N, 0, 0, 0), NULL);
        for (int i = 0; i < N; i++)
            assert_true(back[i] == 0);
    }
    release();
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_expansion), cmocka_unit_test(test_fp8_moments) };
    return cmocka_run_group_tests(tests, start_device, NULL);
}
