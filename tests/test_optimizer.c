/* AdamW, initial values, conversions between plain formats, sums over all elements, and errors for
 * wrong shapes. */
#include "tests/test.h"
#include "tests/golden.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };

/* ---- AdamW ----------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    Format w, m, v, grad;
    int n;
} AdamCase;
// clang-format off
static const AdamCase adam_cases[] = {
    { "adamw-f32",       { F32, 0 },  { F32, 0 },  { F32, 0 },  { F32, 0 },  5120 },
    { "adamw-f32-bf16",  { F32, 0 },  { F32, 0 },  { F32, 0 },  { BF16, 0 }, 5120 },
    { "adamw-bf16",      { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, 5120 },
    { "adamw-bf16-f32",  { BF16, 0 }, { F32, 0 },  { F32, 0 },  { F32, 0 },  256 },
    { "adamw-odd",       { F32, 0 },  { BF16, 0 }, { F32, 0 },  { F32, 0 },  5 },
};
// clang-format on

/* Errors: m, a sum of two products, has 3 u of their sizes, and v has 4 u (its terms are >= 0).
 * sqrt(v/c2) has a relative error of 4 u, the quotient 8 u more, and -lr (q + wd w) + w has 3 u of
 * its terms. Constants such as 1 - b2 are in F32. */
static void adam_reference(double *w, double *m, double *v, double *bw, double *bm, double *bv,
                           double grad, AdamW a)
{
    double g = a.grad_scale * grad, b1 = a.beta1, b2 = a.beta2, c1 = 1 - a.beta1, c2 = 1 - a.beta2;
    *bm = 4 * U24 * (fabs(b1 * *m) + fabs(c1 * g));
    *m = b1 * *m + c1 * g;
    *v = b2 * *v + c2 * g * g;
    *bv = 6 * U24 * *v;
    double below = sqrt(*v / a.correction2) + a.eps, q = *m / a.correction1 / below;
    *bw = a.lr * (*bm / a.correction1 / below + 12 * U24 * fabs(q) +
                  3 * U24 * fabs(a.weight_decay * *w)) +
          3 * U24 * fabs(*w);
    *w -= a.lr * (q + a.weight_decay * *w);
}

static void adam_case(const AdamCase *k)
{
    const AdamW a = { .lr = 0.01f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .weight_decay = 0.1f,
                      .correction1 = 0.19f,
                      .correction2 = 0.0975f,
                      .grad_scale = 0.5f,
                      .seed = 42 };
    const size_t bytes = (size_t)k->n * sizeof(double);
    Tensor w = make_filled(k->w, 1, k->n, 1, -1, 1),
           m = make_filled(k->m, 1, k->n, 2, -1e-3f, 1e-3f);
    Tensor v = make_filled(k->v, 1, k->n, 3, 0, 1e-5f),
           grad = make_filled(k->grad, 1, k->n, 4, -1e-2f, 1e-2f);
    double *W = values(w), *M = values(m), *V = values(v), *G = values(grad);
    double *bw = keep(bytes), *bm = keep(bytes), *bv = keep(bytes);
    TWICE(adamw(w, m, v, grad, a, 768), w, m, v);
    for (int i = 0; i < k->n; i++) {
        adam_reference(&W[i], &M[i], &V[i], &bw[i], &bm[i], &bv[i], G[i], a);
        /* rounded up or down, by less than an ulp, which is twice the unit roundoff */
        if (k->w.dtype == BF16)
            bw[i] += 0x1p-8 * fabs(W[i]);
    }
    char text[64];
    Tensor t[3] = { w, m, v };
    double *ref[3] = { W, M, V }, *bound[3] = { bw, bm, bv };
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "%s-%c", k->name, "wmv"[i]);
        check_close(text, t[i], ref[i], bound[i]);
        golden_check(text, t[i], bound[i]);
    }
}

TEST(test_adamw)
{
    for (size_t i = 0; i < sizeof adam_cases / sizeof adam_cases[0]; i++)
        if (on_cpu() || adam_cases[i].n % 256 == 0) {
            adam_case(&adam_cases[i]);
            release();
        }
}

/* With zero gradients and lr decay = 2^-10, w - 2^-10 w is exact in F32 (8 bits of w, shifted by
 * 10). So only the random bits decide, and every bit is known. The number of an element depends on
 * `first`, not on the sharding of a unit. */
TEST(test_stochastic_rounding)
{
    enum { N = 8192, PART = 2048 };
    const AdamW a = { .lr = 0x1p-10f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .weight_decay = 1,
                      .correction1 = 1,
                      .correction2 = 1,
                      .grad_scale = 1,
                      .seed = 3 };
    Tensor w = make_filled(H, 1, N, 1, -1, 1), again = make(H, 1, N),
           zeros = make_filled(F, 1, N, 0, 0, 0);
    const uint16_t *start = tensor_snapshot(w);
    tensor_restore(again, start);
    adamw(w, zeros, zeros, make_filled(F, 1, N, 0, 0, 0), a, 1 << 20);
    uint16_t *expected = keep(N * sizeof *expected);
    double up = 0, chance = 0, variance = 0;
    for (int i = 0; i < N; i++) {
        float x = float_from_bits((uint32_t)start[i] << 16);
        uint32_t u;
        x -= 0x1p-10f * x;
        memcpy(&u, &x, sizeof u);
        expected[i] = bf16_round_stochastic(x, random_16(3, (uint64_t)((1 << 20) + i)));
        double p = (double)(u & 0xffff) / 0x10000;
        up += expected[i] != u >> 16;
        chance += p, variance += p * (1 - p);
    }
    check_same_bytes("stochastic rounding", tensor_snapshot(w), expected, N * sizeof *expected);
    golden_check("stochastic-rounding", w, NULL);
    /* a sum of independent bits; 5 sigma: 1 in 1.7 million */
    assert_true(fabs(up - chance) < 5 * sqrt(variance));
    for (int at = 0; at < N; at += PART) {
        Tensor part = tensor_at((uint16_t *)again.data + at, H, 1, PART),
               m = make_filled(F, 1, PART, 0, 0, 0);
        Tensor v = make_filled(F, 1, PART, 0, 0, 0), grad = make_filled(F, 1, PART, 0, 0, 0);
        adamw(part, m, v, grad, a, (uint64_t)((1 << 20) + at));
    }
    check_same_bytes("in parts", tensor_snapshot(again), expected, N * sizeof *expected);
    release();
}

/* Returns x (n) in this format; 0 in the format of a moment, which only adamw writes. */
static Tensor in_format(Format f, const float *x, int n)
{
    Tensor t = make(F, 1, n), y = make(f, 1, n);
    device_put(t.data, x, (size_t)n * sizeof *x);
    if (f.group == 0)
        quantize(y, t);
    else {
        device_zero(y.data, (size_t)n);
        device_zero(y.scale, tensor_bytes(y) - (size_t)n);
    }
    return y;
}

/* A range from the middle of each row's half gets the same bits as in the whole matrix. */
static void parts_case(Format moment)
{
    enum { ROWS = 3, WIDTH = 512, WIDE = 2 * WIDTH, START = 256, PART = ROWS * WIDTH - START };
    static float whole[4][ROWS * WIDE], part[4][PART];
    const float size[4] = { 1, 1e-3f, 1e-5f, 1e-2f };
    AdamW a = { .lr = 0.01f,
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .eps = 1e-8f,
                .correction1 = 0.19f,
                .correction2 = 0.0975f,
                .grad_scale = 0.5f,
                .seed = 42 };
    Tensor all[4], own[4];
    for (int k = 0; k < 4; k++) {
        for (int i = 0; i < ROWS * WIDE; i++)
            whole[k][i] = size[k] * (float)uniform((uint64_t)k, (size_t)i, k == 2 ? 0 : -1, 1);
        for (int i = 0; i < PART; i++)
            part[k][i] = whole[k][(START + i) / WIDTH * WIDE + WIDTH + (START + i) % WIDTH];
        const Format f = k == 0 || k == 3 ? H : moment;
        all[k] = in_format(f, whole[k], ROWS * WIDE);
        own[k] = in_format(f, part[k], PART);
    }
    /* the second step has moments that are not 0 in any format */
    for (int step = 0; step < 2; step++) {
        a.numbering = (Numbering){ 0 };
        adamw(all[0], all[1], all[2], all[3], a, 768);
        a.numbering = (Numbering){ WIDTH, START, WIDTH };
        adamw(own[0], own[1], own[2], own[3], a, 768 + WIDTH + START);
    }
    const double *expected = values(all[0]), *found = values(own[0]);
    for (int i = 0; i < PART; i++)
        assert_true(found[i] == expected[(START + i) / WIDTH * WIDE + WIDTH + (START + i) % WIDTH]);
    release();
}

TEST(test_parts)
{
    parts_case(F);
    parts_case((Format){ E4M3, 128, true });
}

TEST(test_rounding_of_extremes)
{
    assert_int_equal(bf16_round_stochastic(INFINITY, 0xffff), 0x7f80);
    assert_int_equal(bf16_round_stochastic(-INFINITY, 0xffff), 0xff80);
    assert_int_equal(bf16_round_stochastic(NAN, 0), 0x7fff);
    assert_int_equal(bf16_round_stochastic(1, 0xffff), 0x3f80);
    assert_int_equal(bf16_round_stochastic(float_from_bits(0x3f800001), 0xffff), 0x3f81);
    assert_int_equal(bf16_round_stochastic(float_from_bits(0x3f800001), 0xfffe), 0x3f80);
    assert_int_equal(bf16_round_stochastic(-0.0f, 0xffff), 0x8000);
}

/* ---- initial values -------------------------------------------------------------------------- */

/* The mean and the variance of n truncated normal numbers lie within 5 standard errors; the
 * variance of z^2 is below 2. */
TEST(test_init)
{
    enum { ROWS = 64, COLS = 512, N = ROWS * COLS };
    Tensor w = make(F, ROWS, COLS), part = make(F, 1, COLS), half = make(H, ROWS, COLS);
    TWICE(init_normal(w, 0.5f, 3, 7, 1000), w);
    const double *x = values(w);
    double sum1 = 0, sum2 = 0, bound[N];
    for (int i = 0; i < N; i++) {
        assert_true(fabs(x[i]) <= 1.5);
        sum1 += x[i] / 0.5 / N, sum2 += x[i] * x[i] / 0.25 / N;
        bound[i] = 0;
    }
    assert_true(fabs(sum1) < 5 / sqrt(N));
    /* variance of a normal truncated at 3 sigma */
    assert_true(fabs(sum2 - 0.97334) < 5 * sqrt(2.0 / N));
    golden_check("init-normal", w, bound);
    init_normal(part, 0.5f, 3, 7, 1000 + 5 * COLS);
    const float *whole = tensor_snapshot(w);
    check_same_bytes("row 5 only", tensor_snapshot(part), whole + 5 * COLS, COLS * sizeof(float));
    init_normal(half, 0.5f, 3, 7, 1000);
    check_close("init in bf16", half, x, bound);

    init_normal(w, 1, 0, 7, 1000);
    x = values(w);
    int beyond = 0;
    for (int i = 0; i < N; i++)
        beyond += fabs(x[i]) > 3;
    /* 0.27 % of 32768 is 88, sigma 9.4 */
    assert_true(beyond > 30 && beyond < 160);
    init_constant(half, -1.5f);
    x = values(half);
    for (int i = 0; i < N; i++)
        assert_true(x[i] == -1.5);
    release();
}

/* ---- formats, sums --------------------------------------------------------------------------- */

/* Every BF16 value, its neighbours in F32 and the ties are rounded to nearest even, as by
 * arithmetic in double. */
TEST(test_bf16)
{
    enum { CODES = 0x7f80, OFFSETS = 5, N = 2 * CODES * OFFSETS };
    static const uint32_t offset[OFFSETS] = { 0, 1, 0x7fff, 0x8000, 0x8001 };
    float *x = keep(N * sizeof *x);
    uint16_t *expected = keep(N * sizeof *expected);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t low = i / OFFSETS % CODES, o = offset[i % OFFSETS], sign = i / OFFSETS / CODES;
        x[i] = float_from_bits(sign << 31 | low << 16 | o);
        bool up = o > 0x8000 || (o == 0x8000 && low % 2);
        expected[i] = (uint16_t)(sign << 15 | (low + up));
    }
    Tensor a = make(F, N / 8, 8), b = make(H, N / 8, 8), c = make(F, N / 8, 8);
    put(a, x);
    TWICE(quantize(b, a), b);
    check_same_bytes("f32 to bf16", tensor_snapshot(b), expected, N * sizeof *expected);
    TWICE(quantize(c, b), c);
    const double *exact = values(b), *back = values(c);
    for (int i = 0; i < N; i++)
        assert_true(exact[i] == back[i] && signbit(exact[i]) == signbit(back[i]));
    void *before = tensor_snapshot(b);
    quantize(b, b);
    check_same_bytes("the same memory", tensor_snapshot(b), before, tensor_bytes(b));
    release();
}

/* Sums of integers up to 64 and of their squares are exact in any order while partial sums are
 * below 2^24. */
TEST(test_sums)
{
    static const int sizes[] = { 1, 7, 1000, 4099, 50000 };
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        const int n = on_cpu() ? sizes[k] : (sizes[k] + 7) / 8 * 8;
        float *x = keep((size_t)n * sizeof *x), s = 3;
        double total = 3, squares = 3;
        for (int i = 0; i < n; i++) {
            x[i] = (float)((int)(random_bits(9, (uint64_t)i) % 33) - 16);
            total += x[i], squares += x[i] * x[i];
        }
        Tensor t = make(F, 1, n), half = make(H, 1, n), out = make_f32(1, 1);
        put(t, x), put(half, x), put(out, &s);
        TWICE(sum_values(out.data, t.data, (size_t)n), out);
        assert_true(values(out)[0] == total);
        put(out, &s);
        TWICE(sum_squares(out.data, t), out);
        assert_true(values(out)[0] == squares);
        put(out, &s);
        sum_squares(out.data, half);
        assert_true(values(out)[0] == squares);
        x[n / 2] = k % 2 ? NAN : INFINITY;
        put(t, x), put(half, x), put(out, &s);
        sum_squares(out.data, t);
        assert_false(isfinite(values(out)[0]));
        put(out, &s);
        sum_squares(out.data, half);
        assert_false(isfinite(values(out)[0]));
        release();
    }
}

TEST(test_sum_golden)
{
    enum { N = 10000 };
    for (int k = 0; k < 2; k++) {
        Tensor x = make_filled(k ? H : F, 1, N, 11, -1, 1), out = make_filled(F, 1, 1, 0, 0, 0);
        const double *v = values(x);
        double total = 0, bound = 0;
        for (int i = 0; i < N; i++)
            total += v[i] * v[i];
        bound = (N + 1) * U24 * total;
        TWICE(sum_squares(out.data, x), out);
        check_close("sum_squares", out, &total, &bound);
        golden_check(k ? "sum_squares-bf16" : "sum_squares-f32", out, &bound);
    }
    release();
}

/* The shares 1, 1/2 and 1/3 give the mean of three tensors of numbers below 1, which overwrites
 * NaNs. Each of the last two calls rounds a share, a difference and a product of numbers up to 2,
 * and a sum: less than 8 roundings of 2. */
TEST(test_mean)
{
    static const int sizes[] = { 1, 7, 4099, 20000 };
    for (size_t k = 0; k < 2 * sizeof sizes / sizeof sizes[0]; k++) {
        const int n = on_cpu() ? sizes[k / 2] : (sizes[k / 2] + 7) / 8 * 8;
        double *exact = keep((size_t)n * sizeof *exact), *bound = keep((size_t)n * sizeof *bound);
        Tensor mean = make(F, 1, n), first = make_filled(k % 2 ? H : F, 1, n, 1, -1, 1);
        fill(mean, 4, NAN, NAN);
        for (int i = 1; i <= 3; i++) {
            const Tensor w = i == 1 ? first : make_filled(k % 2 ? H : F, 1, n, (uint64_t)i, -1, 1);
            const double *v = values(w);
            for (int j = 0; j < n; j++) {
                exact[j] += v[j] / 3;
                bound[j] = 16 * U24;
            }
            average_weights(mean, w, 1 / (float)i);
            if (i == 1)
                check_same_values("the first", values(mean), v, (size_t)n);
        }
        check_close("average_weights", mean, exact, bound);
        release();
    }
}

/* Each sum is rounded once, and has the same bits in either order. */
TEST(test_accumulate)
{
    static const int sizes[] = { 1, 7, 4099, 20000 };
    for (size_t k = 0; k < 2 * sizeof sizes / sizeof sizes[0]; k++) {
        const int n = on_cpu() ? sizes[k / 2] : (sizes[k / 2] + 7) / 8 * 8;
        const Format f = k % 2 ? H : F;
        const Tensor x = make_filled(f, 1, n, 1, -1, 1), y = make_filled(f, 1, n, 2, -9, 9),
                     again = make_filled(f, 1, n, 2, -9, 9);
        const double *a = values(x), *b = values(y);
        double *exact = keep((size_t)n * sizeof *exact),
               *nothing = keep((size_t)n * sizeof *nothing);
        for (int i = 0; i < n; i++)
            exact[i] = a[i] + b[i];
        accumulate(y, x);
        accumulate(x, again);
        check_close("accumulate", y, exact, nothing);
        check_same_values("x += y", values(x), values(y), (size_t)n);
        release();
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(test_errors)
{
    Tensor a = make(F, 8, 16), b = make(F, 8, 24), c = make(F, 24, 16),
           fp8 = make((Format){ E4M3, 0 }, 8, 16);
    Tensor stats = make_f32(8, 2), ints = make_f32(8, 1), odd = a;
    Tensor row = make(F, 1, 16), row8 = make((Format){ E4M3, 0 }, 1, 16),
           c8 = make((Format){ E4M3, 0 }, 24, 16);
    const Norm norm = { RMS_NORM, 1e-5f };
    DIES("quantize: y is (8, 24); expected (8, 16)", quantize(b, a));
    DIES("quantize: there is no x", quantize(b, NONE));
    odd.format = H;
    DIES("in the same memory", quantize(odd, a));
    odd.format = (Format){ F32, 16 };
    DIES("quantize: x is f32/16", quantize(b, odd));
    odd = fp8, odd.scale = NULL;
    DIES("quantize: x is e4m3 without scales", quantize(a, odd));
    odd = fp8, odd.format.group = 3;
    DIES("quantize: x is e4m3/3", quantize(a, odd));
    DIES("matmul: y is (8, 16); expected (8, 24)", matmul(a, a, c, NONE));
    DIES("matmul: w is (8, 24)", matmul(b, a, b, NONE));
    DIES("matmul: add is (8, 16)", matmul(b, a, c, a));
    DIES("matmul_dx: dx is", matmul_dx(b, b, c, false));
    DIES("matmul_dw: dw is (8, 16); expected (24, 16)", matmul_dw(a, b, a));
    DIES("matmul_dw: dw is e4m3", matmul_dw(c8, b, a));
    DIES("matmul: no GEMM of e4m3 and f32", matmul(b, fp8, c, NONE));
    const Tensor square = make(F, 16, 16), e5 = make((Format){ E5M2, 0 }, 8, 24);
    DIES("matmul: the result has the memory of an operand", matmul(a, a, square, NONE));
    odd = c8, odd.data_t = NULL;
    DIES("matmul_dx: w is e4m3 without the transposed copy", matmul_dx(a, e5, odd, false));
    DIES("norm_forward: y is (8, 24)",
         norm_forward(b, a, stats.data, a, NONE, NONE, norm, FROM_SAVED));
    DIES("norm_forward: w is (8, 16)",
         norm_forward(a, a, stats.data, a, a, NONE, norm, FROM_SAVED));
    DIES("norm_backward: x is (8, 24)",
         norm_backward(a, NULL, NONE, a, b, stats.data, NONE, norm, false));
    DIES("swiglu_forward: gate_up is (8, 24)", swiglu_forward(a, b, b, NO_PRODUCT, FROM_SAVED));
    DIES("embedding_forward: y is (8, 24)", embedding_forward(b, ints.data, c));
    DIES("vocabulary",
         cross_entropy(a, stats.data, stats.data, ints.data, NULL, 17, 1, 1, 0, false));
    DIES("cross_entropy: logits is e4m3",
         cross_entropy(fp8, stats.data, stats.data, ints.data, NULL, 16, 1, 1, 0, false));
    DIES("adamw: grad is (8, 16)", adamw(row, row, row, a, (AdamW){ 0 }, 0));
    DIES("average_weights: mean is (8, 16); expected (1, 16)", average_weights(a, row, 1));
    DIES("accumulate: y is (8, 16); expected (1, 16)", accumulate(a, row));
    DIES("accumulate: x is e4m3", accumulate(row, row8));
    DIES("adamw: w is e4m3", adamw(row8, row, row, row, (AdamW){ 0 }, 0));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
