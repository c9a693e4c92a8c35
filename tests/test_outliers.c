/* Outliers of SwiGLU [arXiv 2409.12517]: one channel, whose gate and up are aligned and grow, in the FP8 input of `down`.
 *
 * E4M3 has digits for a factor of 448 / 2^-6; below, codes are 2^-9 apart, an error of 2^-9 / sqrt(12) of the scale. It is 1 % of the
 * root mean square r of a channel when r = 0.056 S: when max|act| = 448 S is 7,945 r. */
#include "tests/fp8.h"

enum { N = 256, C = 64, F = 128, REACH = 7945, SIZES = 6 };
static const Format H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 };

/* act in double, of BF16 gate and up; and what the GEMMs multiply it with. */
static struct { Tensor wide, w, dy; double *act, *weight, *gradient; } layer;

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

/* Channel `outlier` has gate = up = size z, where z is normal: act is size^2 z^2 for z > 0, and about 0 below. */
static void make_layer(float size, int outlier)
{
    float *x = normal((size_t)N * 2 * F, 1);
    for (int n = 0; n < N; n++)
        x[n * 2 * F + outlier] = x[n * 2 * F + F + outlier] = size * x[n * 2 * F + outlier];
    layer.wide = make(H, N, 2 * F);
    put(layer.wide, x);
    layer.w = normal_operand(E4, C, F, 2);
    layer.dy = normal_operand(E5, N, C, 3);
    layer.weight = values(layer.w);
    layer.gradient = values(layer.dy);
    layer.act = keep(sizeof(double) * N * F);
    const double *wide = values(layer.wide);
    for (int i = 0; i < N * F; i++) {
        const double gate = wide[i / F * 2 * F + i % F], up = wide[i / F * 2 * F + F + i % F];
        layer.act[i] = gate / (1 + exp(-gate)) * up;
    }
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

/* ---- what a remedy loses ---------------------------------------------------------------------------------------- */

/* Relative errors of the layer's output in tokens where the outlier is silent; of the other channels' part of it in all tokens; of
 * the other channels' weight gradient. */
typedef struct { double silent, others, dw; } Lost;

static double ratio(double error2, double norm2)
{
    return sqrt(error2 / norm2);
}

/* act, act_dw: values as the two GEMMs read them; w: as forward does. */
static Lost lost(const double *act, const double *act_dw, const double *w)
{
    double e[3] = { 0 }, norm[3] = { 0 };
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            double y = 0, found = 0;
            for (int f = 1; f < F; f++) {
                y += layer.act[n * F + f] * layer.weight[c * F + f];
                found += act[n * F + f] * w[c * F + f];
            }
            const double more = act[n * F] * w[c * F] - layer.act[n * F] * layer.weight[c * F];
            const bool silent = fabs(layer.act[n * F]) < 0.1;
            e[1] += (found - y) * (found - y), norm[1] += y * y;
            e[0] += silent ? (found + more - y) * (found + more - y) : 0, norm[0] += silent ? y * y : 0;
        }
    for (int c = 0; c < C; c++)
        for (int f = 1; f < F; f++) {
            double dw = 0, error = 0;
            for (int n = 0; n < N; n++) {
                dw += layer.gradient[n * C + c] * layer.act[n * F + f];
                error += layer.gradient[n * C + c] * (act_dw[n * F + f] - layer.act[n * F + f]);
            }
            e[2] += error * error, norm[2] += dw * dw;
        }
    return (Lost){ ratio(e[0], norm[0]), ratio(e[1], norm[1]), ratio(e[2], norm[2]) };
}

static Lost lost_by_operand(bool by_channel)
{
    const Tensor act = encoded(by_channel);
    double *x = values(act), *w = layer.weight;
    if (by_channel) {
        const float *channel = channels_of(act);
        double *of_w = w = values(folded(act.channel));
        for (int i = 0; i < N * F; i++)
            x[i] /= channel[i % F];
        for (int i = 0; i < C * F; i++)
            of_w[i] *= channel[i % F];
    }
    return lost(x, x, w);
}

/* Rounds n values `step` apart under one scale. */
static void round_with_scale(double *x, int n, int step)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, fabs(x[i * step]));
    for (int i = 0; i < n && most > 0; i++)
        x[i * step] = decode_fp8(fp8_nearest(x[i * step] / most * 448, E4M3), E4M3) * most / 448;
}

/* The scale of a token in forward, of a channel for the weight's gradient, as GEMMs with a scale per row and column take them. */
static Lost lost_by_token(void)
{
    double *x = keep(sizeof(double) * N * F), *x_dw = keep(sizeof(double) * N * F);
    memcpy(x, layer.act, sizeof(double) * N * F), memcpy(x_dw, layer.act, sizeof(double) * N * F);
    for (int n = 0; n < N; n++)
        round_with_scale(x + n * F, F, 1);
    for (int f = 0; f < F; f++)
        round_with_scale(x_dw + f, N, F);
    return lost(x, x_dw, layer.weight);
}

static double root_mean_square(const double *x, int n, int step)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i * step] * x[i * step];
    return sqrt(sum / n);
}

/* Clamped to what one scale can hold; the outlier is lost instead: its error relative to its own size. */
static Lost lost_by_clamp(double limit, double *outlier)
{
    double *x = keep(sizeof(double) * N * F), error2 = 0;
    for (int i = 0; i < N * F; i++)
        x[i] = fmin(fmax(layer.act[i], -limit), limit);
    round_with_scale(x, N * F, 1);
    for (int n = 0; n < N; n++)
        error2 += (x[n * F] - layer.act[n * F]) * (x[n * F] - layer.act[n * F]);
    *outlier = sqrt(error2 / N) / root_mean_square(layer.act, N, F);
    return lost(x, x, layer.weight);
}

/* What is lost beside the rounding of E4M3 that every tensor has. */
static Lost beside(Lost x, Lost usual)
{
    return (Lost){ sqrt(fmax(0, x.silent * x.silent - usual.silent * usual.silent)),
                   sqrt(fmax(0, x.others * x.others - usual.others * usual.others)),
                   sqrt(fmax(0, x.dw * x.dw - usual.dw * usual.dw)) };
}

/* Root mean square of the others, whose channels are alike, and the maximum of all. */
static double reach(void)
{
    double most = 0, others2 = 0;
    for (int i = 0; i < N * F; i++) {
        most = fmax(most, fabs(layer.act[i]));
        others2 += i % F ? layer.act[i] * layer.act[i] : 0;
    }
    return most / sqrt(others2 / (N * (F - 1)));
}

/* One scale loses 1 % at a reach of REACH. The loss is proportional to it while most codes have digits, and less than that later:
 * sizes are powers of two, so at the first reach above 2 REACH it is more than 1 %, at the last below REACH / 2 less. Factors
 * leave a reach of at most 2^7 times the median channel's maximum. */
static void test_remedies(void **state)
{
    (void)state;
    static const float size[SIZES] = { 1, 16, 32, 64, 128, 256 };
    Lost usual = { 0 };
    print_message("reach of act: %% lost beside rounding in silent tokens, others' part, others' dw\n");
    for (int i = 0; i < SIZES; i++) {
        make_layer(size[i], 0);
        double outlier;
        const double r = reach(), limit = 64 * root_mean_square(layer.act + 1, N, F);
        const Lost tensor = lost_by_operand(false), channel = lost_by_operand(true), token = lost_by_token();
        const Lost clamp = lost_by_clamp(limit, &outlier);
        usual = i == 0 ? tensor : usual;
        const Lost all[] = { tensor, token, channel, clamp };
        print_message("%8.0f", r);
        for (int k = 0; k < 4; k++) {
            const Lost l = beside(all[k], usual);
            print_message(" | %6.2f %6.2f %6.2f", 100 * l.silent, 100 * l.others, 100 * l.dw);
        }
        print_message(" (outlier %.1f)\n", 100 * outlier);
        release();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_remedies) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
