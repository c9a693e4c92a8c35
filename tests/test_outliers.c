/* Outliers of SwiGLU [arXiv 2409.12517]: one channel, whose gate and up are aligned and grow, in
 * the FP8 input of `down`.
 *
 * From 2^-6 to 448, the codes of E4M3 have all mantissa bits. Below 2^-6 they are 2^-9 apart: an
 * error of S 2^-9 / sqrt(12) for a scale S. It is 1 % of the root mean square r of a channel if r =
 * 0.056 S, that is, if max|act| = 448 S is 7,945 r. */
#include "tests/test.h"
#include "tests/fp8.h"

enum { N = 272, C = 64, F = 144, REACH = 7945, SIZES = 7 };
static const Format H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 };

/* act in double, from BF16 gate and up; and the factors by which the GEMMs multiply it. */
static struct {
    Tensor wide, w, dy;
    double *act, *weight, *gradient;
} layer;

static float *normal(size_t n, uint64_t seed)
{
    const Tensor t = make_f32(1, (int)n);
    float *x = keep(n * sizeof *x);
    init_normal(t, 1, 4, seed, 0);
    device_get(x, t.data, n * sizeof *x);
    return x;
}

static Tensor normal_operand(Format f, int rows, int cols, uint64_t seed)
{
    const Tensor y = make_operand(f, rows, cols), x = make(H, rows, cols);
    put(x, normal((size_t)rows * (size_t)cols, seed));
    quantize(y, x);
    return y;
}

static void compute_act(void)
{
    const double *wide = values(layer.wide);
    layer.act = keep(sizeof(double) * N * F);
    for (int i = 0; i < N * F; i++) {
        const double gate = wide[i / F * 2 * F + i % F], up = wide[i / F * 2 * F + F + i % F];
        layer.act[i] = gate / (1 + exp(-gate)) * up;
    }
}

/* In channel 0, gate = up = size z with a normal z. So act is size^2 z^2 for z > 0, and about 0 for
 * z < 0. */
static void make_layer(float size)
{
    float *x = normal((size_t)N * 2 * F, 1);
    for (int n = 0; n < N; n++)
        x[n * 2 * F] = x[n * 2 * F + F] = size * x[n * 2 * F];
    layer.wide = make(H, N, 2 * F);
    put(layer.wide, x);
    layer.w = normal_operand(E4, C, F, 2);
    layer.dy = normal_operand(E5, N, C, 3);
    layer.weight = values(layer.w);
    layer.gradient = values(layer.dy);
    compute_act();
}

static float *channels_of(Tensor t)
{
    float *x = keep(sizeof(float) * (size_t)t.cols);
    device_get(x, t.channel, sizeof(float) * (size_t)t.cols);
    return x;
}

static Tensor encoded(bool by_channel)
{
    Tensor act = make_operand(E4, N, F);
    act.channel = by_channel ? guarded(sizeof(float) * F) : NULL;
    swiglu_forward(act, layer.wide, layer.wide, NO_PRODUCT, FROM_SAVED);
    return act;
}

static Tensor folded(const float *channel)
{
    const Tensor y = make(E4, C, F);
    fold_channels(y, rows_of(layer.w), channel);
    return y;
}

/* ---- what a remedy loses --------------------------------------------------------------------- */

/* act as the GEMMs of forward and of the weight's gradient read it, and w as forward reads it; and
 * the same values without limits of the exponent. */
typedef struct {
    double *act, *act_dw;
    const double *w;
} Read;

/* Relative errors, in addition to the rounding of the mantissa that all E4M3 tensors have: of the
 * layer's output in tokens without an outlier; of the other channels' part of the output in all
 * tokens; and of the other channels' weight gradient. */
typedef struct {
    double silent, others, dw;
} Lost;

static double ratio(double error2, double norm2)
{
    return sqrt(error2 / norm2);
}

static Lost lost(Read limited, Read digits)
{
    double e[3] = { 0 }, norm[3] = { 0 };
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            double y = 0, error = 0;
            for (int f = 1; f < F; f++) {
                y += layer.act[n * F + f] * layer.weight[c * F + f];
                error += limited.act[n * F + f] * limited.w[c * F + f] -
                         digits.act[n * F + f] * digits.w[c * F + f];
            }
            const double more =
                limited.act[n * F] * limited.w[c * F] - digits.act[n * F] * digits.w[c * F];
            const bool silent = fabs(layer.act[n * F]) < 0.1;
            e[0] += silent ? (error + more) * (error + more) : 0, norm[0] += silent ? y * y : 0;
            e[1] += error * error, norm[1] += y * y;
        }
    for (int c = 0; c < C; c++)
        for (int f = 1; f < F; f++) {
            double dw = 0, error = 0;
            for (int n = 0; n < N; n++) {
                dw += layer.gradient[n * C + c] * layer.act[n * F + f];
                error += layer.gradient[n * C + c] *
                         (limited.act_dw[n * F + f] - digits.act_dw[n * F + f]);
            }
            e[2] += error * error, norm[2] += dw * dw;
        }
    return (Lost){ ratio(e[0], norm[0]), ratio(e[1], norm[1]), ratio(e[2], norm[2]) };
}

/* Rounds x to the mantissa of E4M3. unlimited: with any exponent, so that only mantissa bits are
 * lost. */
static double rounded(double x, double scale, bool unlimited)
{
    int e;
    const double m = frexp(x / scale, &e);
    return unlimited ? ldexp(rint(ldexp(m, 4)), e - 4) * scale
                     : decode_fp8(fp8_nearest(x / scale, E4M3), E4M3) * scale;
}

static Lost lost_by_operand(bool by_channel)
{
    const Tensor act = encoded(by_channel);
    double *x = values(act), *digits = keep(sizeof(double) * N * F), *w = layer.weight;
    if (by_channel) {
        const float *channel = channels_of(act);
        w = values(folded(act.channel));
        for (int i = 0; i < N * F; i++)
            x[i] /= channel[i % F];
        for (int i = 0; i < C * F; i++)
            w[i] *= channel[i % F];
    }
    for (int i = 0; i < N * F; i++)
        digits[i] = rounded(layer.act[i], operand_scale(act), true);
    return lost((Read){ x, x, w }, (Read){ digits, digits, layer.weight });
}

/* Rounds n values `step` apart under one scale. */
static void round_with_scale(double *x, int n, int step, bool unlimited)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, fabs(x[i * step]));
    for (int i = 0; i < n && most > 0; i++)
        x[i * step] = rounded(x[i * step], most / 448, unlimited);
}

static double *copy_of_act(void)
{
    double *x = keep(sizeof(double) * N * F);
    memcpy(x, layer.act, sizeof(double) * N * F);
    return x;
}

/* One scale per token in forward, and one per channel for the weight's gradient, as in GEMMs with a
 * scale per row and column. */
static Lost lost_by_token(void)
{
    Read read[2];
    for (int unlimited = 0; unlimited < 2; unlimited++) {
        read[unlimited] = (Read){ copy_of_act(), copy_of_act(), layer.weight };
        for (int n = 0; n < N; n++)
            round_with_scale(read[unlimited].act + n * F, F, 1, unlimited);
        for (int f = 0; f < F; f++)
            round_with_scale(read[unlimited].act_dw + f, N, F, unlimited);
    }
    return lost(read[0], read[1]);
}

static double root_mean_square(const double *x, int n, int step)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i * step] * x[i * step];
    return sqrt(sum / n);
}

/* Values are clamped, so the outlier is lost instead. Returns the outlier's error relative to its
 * size. */
static Lost lost_by_clamp(double limit, double *outlier)
{
    Read read[2];
    double error2 = 0;
    for (int unlimited = 0; unlimited < 2; unlimited++) {
        double *x = copy_of_act();
        for (int i = 0; i < N * F; i++)
            x[i] = fmin(fmax(x[i], -limit), limit);
        round_with_scale(x, N * F, 1, unlimited);
        read[unlimited] = (Read){ x, x, layer.weight };
    }
    for (int n = 0; n < N; n++)
        error2 += (read[0].act[n * F] - layer.act[n * F]) * (read[0].act[n * F] - layer.act[n * F]);
    *outlier = sqrt(error2 / N) / root_mean_square(layer.act, N, F);
    return lost(read[0], read[1]);
}

/* Returns the maximum of all channels, divided by the root mean square of the other channels, which
 * are alike. */
static double reach(void)
{
    double most = 0, others2 = 0;
    for (int i = 0; i < N * F; i++) {
        most = fmax(most, fabs(layer.act[i]));
        others2 += i % F ? layer.act[i] * layer.act[i] : 0;
    }
    return most / sqrt(others2 / (N * (F - 1)));
}

/* Returns the error of subnormal codes in a tensor with this reach, together with the rounding of
 * the mantissa bits that these codes lack, which is at most half of the error. */
static double explained(double reach)
{
    return 0.01 * hypot(1, 0.5) * reach / REACH;
}

/* With one scale, the error is at most the error of subnormal codes. It is at least half of it as
 * long as most codes are subnormal, because products of normal numbers are often small. Factors
 * leave channels of up to 2^7 times the median channel's maximum, which is less than 14 of its root
 * mean squares here. The weight, with values up to 4, loses as much as a tensor with its ratio of
 * factors. With scales of tokens, nothing is lost in tokens without an outlier and, with scales of
 * channels for the gradient, in the gradient. A clamp loses the outlier. */
TEST(test_remedies)
{
    static const float sizes[SIZES] = { 1, 16, 32, 48, 64, 128, 256 };
    print_message("%% lost in silent tokens, others' part, others' dw: one scale | tokens | "
                  "channels | clamp, and the outlier\n");
    for (int i = 0; i < SIZES; i++) {
        make_layer(sizes[i]);
        double outlier;
        const double r = reach(), left = fmin(r, 14 * 128);
        const float least = channels_of(encoded(true))[0];
        const double limit = 448 * root_mean_square(layer.act + 1, N, F);
        const Lost one = lost_by_operand(false), token = lost_by_token(),
                   channel = lost_by_operand(true);
        const Lost clamp = lost_by_clamp(limit, &outlier);
        const Lost *const all[] = { &one, &token, &channel, &clamp };
        print_message("reach %7.0f:", r);
        for (int k = 0; k < 4; k++)
            print_message(" %6.2f %6.2f %6.2f %s", 100 * all[k]->silent, 100 * all[k]->others,
                          100 * all[k]->dw, k < 3 ? "|" : "");
        print_message("%.1f\n", 100 * outlier);
        if (sizes[i] >= 32 && sizes[i] <= 64)
            assert_true(fmin(one.silent, one.dw) > explained(r) / 2 &&
                        fmax(one.others, one.dw) < explained(r));
        if (sizes[i] == 48)
            assert_true(one.silent > 0.01);
        assert_true(fmax(channel.silent, fmax(channel.others, channel.dw)) <=
                    hypot(explained(left), explained(4 / least)));
        assert_true(fmax(token.silent, token.dw) < 0.001 && (sizes[i] < 32 || outlier > 0.85));
        release();
    }
}

/* ---- the operations -------------------------------------------------------------------------- */

static bool scales_reused;

/* Two outliers of different sizes, three channels of zeros, and others of different sizes: half of
 * the other channels have the median size. */
static void make_outliers(float first, float second)
{
    make_layer(first);
    float *x = keep(sizeof(float) * N * 2 * F);
    const double *wide = values(layer.wide);
    for (int i = 0; i < N * 2 * F; i++)
        x[i] = (float)wide[i] * (i % F == 0       ? 1
                                 : i % F == 5     ? second
                                 : i % F >= F - 3 ? 0
                                                  : ldexpf(1, i % F % 7 - 3));
    put(layer.wide, x);
    compute_act();
}

/* Computes the factors from maxima in double. No maximum is near a power of two, where rounding
 * could decide. */
static double *expected_factors(void)
{
    double *factor = keep(sizeof(double) * F);
    int exponent[F], sorted[F], count = 0;
    for (int f = 0; f < F; f++) {
        double most = 0;
        for (int n = 0; n < N; n++)
            most = fmax(most, fabs(layer.act[n * F + f]));
        exponent[f] = most > 0 ? (int)floor(log2(most)) : -1000;
        assert_true(most == 0 || fabs(most / ldexp(1, exponent[f]) - 1) > 1e-6);
        int at = count;
        for (; most > 0 && at > 0 && sorted[at - 1] > exponent[f]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = exponent[f];
        count += most > 0;
    }
    for (int f = 0; f < F; f++)
        factor[f] = ldexp(1, -(int)fmax(0, exponent[f] - sorted[(count - 1) / 2] - 6));
    return factor;
}

static double *times(const double *x, const double *factor)
{
    double *y = keep(sizeof(double) * N * F);
    for (int i = 0; i < N * F; i++)
        y[i] = x[i] * factor[i % F];
    return y;
}

/* Errors of CUDA's fast functions, as in test_fp8_operations: less than 128 u. */
static double *bounds(const double *x)
{
    double *y = keep(sizeof(double) * N * F);
    for (int i = 0; i < N * F; i++)
        y[i] = 128 * U24 * fabs(x[i]) + 1e-36;
    return y;
}

static void expect_factors(Tensor act, const double *factor)
{
    const float *found = channels_of(act);
    for (int f = 0; f < F; f++)
        if (found[f] != (float)factor[f])
            fail_msg("channel %d: factor %g, expected %g", f, found[f], factor[f]);
}

/* The factors are measured, then kept, although the second outlier has vanished and all other
 * values have grown. */
static void factors_case(bool exact, bool transposed)
{
    make_outliers(64, 24);
    const Tensor saved = exact ? make((Format){ E4M3, 16 }, N, 2 * F) : layer.wide;
    Tensor act = transposed ? make_operand(E4, N, F) : make(E4, N, F);
    act.channel = guarded(sizeof(float) * F);
    act.scale_amax = guarded(sizeof(float));
    act.scale_reused = &scales_reused;
    swiglu_forward(act, saved, layer.wide, NO_PRODUCT, exact ? FROM_EXACT : FROM_SAVED);
    const double *factor = expected_factors();
    assert_true(factor[0] < factor[5] && factor[5] < 1 && factor[1] == 1 && factor[F - 1] == 1);
    expect_factors(act, factor);
    const double *ref = times(layer.act, factor);
    check_operand("act", act, ref, bounds(ref));
    make_outliers(128, 1);
    scales_reused = true;
    swiglu_forward(act, exact ? saved : layer.wide, layer.wide, NO_PRODUCT,
                   exact ? FROM_EXACT : FROM_SAVED);
    scales_reused = false;
    expect_factors(act, factor);
    ref = times(layer.act, factor);
    check_codes("act within its range", act, ref, bounds(ref));
    if (transposed)
        check_transposed("act", act);
    release();
}

TEST(test_factors)
{
    for (int i = 0; i < 4; i++)
        factors_case(i % 2, i / 2);
}

/* Two columns of 1.5, two of 1.5 2^8, all others 0: half of the four columns do not exceed the
 * exponent 0. */
TEST(test_median)
{
    enum { SIZE = 16 };
    float x[SIZE * 2 * SIZE] = { 0 }, factor[SIZE];
    for (int n = 0; n < SIZE; n++)
        for (int f = 0; f < 4; f++) {
            x[n * 2 * SIZE + f] = 64; /* silu(64) = 64 */
            x[n * 2 * SIZE + SIZE + f] = (f < 2 ? 1.5f : 384) / 64;
        }
    const Tensor wide = make(H, SIZE, 2 * SIZE);
    Tensor act = make_operand(E4, SIZE, SIZE);
    put(wide, x);
    act.channel = guarded(sizeof factor);
    swiglu_forward(act, wide, wide, NO_PRODUCT, FROM_SAVED);
    device_get(factor, act.channel, sizeof factor);
    for (int f = 0; f < SIZE; f++)
        assert_true(factor[f] == (f == 2 || f == 3 ? 0.25f : 1));
    release();
}

/* Without an outlier the bits are those without factors. */
TEST(test_no_outlier)
{
    make_layer(4);
    const Tensor with = encoded(true), without = encoded(false), w = rows_of(layer.w);
    check_same_bytes("act", tensor_snapshot(with), tensor_snapshot(without),
                     tensor_bytes(with) - 12);
    check_same_bytes("w", tensor_snapshot(folded(with.channel)), tensor_snapshot(w),
                     tensor_bytes(w) - 12);
    release();
}

/* Compares the codes of the weight, and the products of both GEMMs that read act, with double. */
TEST(test_products)
{
    make_outliers(128, 24);
    const Tensor act = encoded(true), w = folded(act.channel), y = make_f32(N, C);
    const float *factor = channels_of(act);
    const uint8_t *codes = tensor_snapshot(w), *from = tensor_snapshot(layer.w);
    for (int i = 0; i < C * F; i++)
        assert_int_equal(codes[i],
                         fp8_nearest(decode_fp8(from[i], E4M3) * factor[0] / factor[i % F], E4M3));
    assert_true(operand_scale(w) == operand_scale(layer.w) / factor[0]);
    matmul(y, act, w, NONE);
    double *ref = keep(sizeof(double) * N * C), *bound = keep(sizeof(double) * N * C);
    product(ref, bound, NULL, N, C, F, (Strided){ values(act), F, 1 },
            (Strided){ values(w), F, 1 });
    check_close("y", y, ref, bound);
    release();
}

/* dw += dy^T act, with the values of act. The old contents of dw stay. */
TEST(test_gradient)
{
    static const Format formats[] = { { F32, 0 }, { BF16, 0 } };
    for (int i = 0; i < 4; i++) {
        make_outliers(128, 24);
        const Tensor act = encoded(true);
        Tensor dw = make_filled(formats[i / 2], C, F, 9, -8, 8);
        const double *before = values(dw), *x = values(act);
        const float *factor = channels_of(act);
        double *ref = keep(sizeof(double) * C * F), *bound = keep(sizeof(double) * C * F);
        dw.empty = i % 2;
        matmul_dw(dw, layer.dy, act);
        double *divided = keep(sizeof(double) * N * F);
        for (int k = 0; k < N * F; k++)
            divided[k] = x[k] / factor[k % F];
        product(ref, bound, dw.empty ? NULL : before, C, F, N, (Strided){ layer.gradient, 1, C },
                (Strided){ divided, 1, F });
        /* the product may be rounded before the addition */
        for (int k = 0; k < C * F && i / 2; k++)
            bound[k] += 0x1p-8 * fabs(ref[k] - (dw.empty ? 0 : before[k]));
        check_close("dw", dw, ref, bound);
        release();
    }
}

/* Backward recomputes act with the same factors. Columns without factors are the same. */
TEST(test_again)
{
    make_outliers(128, 24);
    const Tensor act = encoded(true), dact = make_filled(H, N, F, 4, -1, 1);
    Tensor again = make_operand(E4, N, F), d = make_operand(E5, N, 2 * F),
           other = make_operand(E5, N, 2 * F);
    again.scale = act.scale, again.channel = act.channel;
    swiglu_backward(d, again, dact, NO_PRODUCT, layer.wide);
    swiglu_backward(other, NONE, dact, NO_PRODUCT, layer.wide);
    check_same_bytes("act again", tensor_snapshot(again), tensor_snapshot(act),
                     tensor_bytes(act) - 12);
    check_same_bytes("gradient", tensor_snapshot(d), tensor_snapshot(other), tensor_bytes(d) - 12);
    release();
}

/* One fused operation or two operations give the same bits, with any factors. */
TEST(test_fused)
{
    enum { TOKENS = 144, WIDTH = 256, MODEL = 4096 };
    Tensor x = make_round(E4, TOKENS, MODEL, 1, 1.0f / 16),
           dy = make_round(E5, TOKENS, MODEL, 2, 1.0f / 16);
    const Tensor up = make_round(E4, 2 * WIDTH, MODEL, 3, 1.0f / 16),
                 down = make_round(E4, MODEL, WIDTH, 4, 1.0f / 16);
    const Tensor wide = make(H, TOKENS, 2 * WIDTH),
                 gate_up[2] = { make((Format){ E4M3, 16 }, TOKENS, 2 * WIDTH), gate_up[0] };
    const Tensor dact = make(H, TOKENS, WIDTH);
    Tensor act[2], d[2], again[2];
    float factor[WIDTH], range = 4, gradient_range = 64;
    for (int f = 0; f < WIDTH; f++)
        factor[f] = ldexpf(1, -(f % 11));
    x.fast = dy.fast = true;
    scales_reused = true;
    for (int i = 0; i < 2; i++) {
        act[i] = make(E4, TOKENS, WIDTH), d[i] = make_operand(E5, TOKENS, 2 * WIDTH),
        again[i] = make_operand(E4, TOKENS, WIDTH);
        act[i].channel = again[i].channel = guarded(sizeof factor);
        again[i].scale = act[i].scale;
        act[i].scale_amax = guarded(sizeof(float)), d[i].scale_amax = guarded(sizeof(float));
        act[i].scale_reused = d[i].scale_reused = &scales_reused;
        device_put(act[i].channel, factor, sizeof factor);
        device_put(act[i].scale_amax, &range, sizeof range);
        device_put(d[i].scale_amax, &gradient_range, sizeof gradient_range);
    }
    matmul_swiglu(act[0], gate_up[0], wide, x, up);
    matmul_dx_swiglu(d[0], columns_of(again[0]), dact, dy, down, gate_up[0]);
    matmul(wide, x, up, NONE);
    swiglu_forward(act[1], gate_up[1], wide, NO_PRODUCT, FROM_EXACT);
    matmul_dx(dact, dy, down, false);
    swiglu_backward(d[1], columns_of(again[1]), dact, NO_PRODUCT, gate_up[1]);
    scales_reused = false;
    check_same_bytes("act", tensor_snapshot(act[0]), tensor_snapshot(act[1]),
                     tensor_bytes(act[0]) - 12);
    check_same_bytes("gradient", tensor_snapshot(d[0]), tensor_snapshot(d[1]),
                     tensor_bytes(d[0]) - 12);
    const size_t codes = tensor_numel(again[0]);
    check_same_bytes("act again", (char *)tensor_snapshot(again[0]) + codes,
                     (char *)tensor_snapshot(again[1]) + codes, codes);
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
