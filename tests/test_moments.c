/* FP8 moments of AdamW, both or one of them, with and without dynamic range expansion [COAT, sec.
 * 4]: scales, exponents and decoded values, tested only through adamw(). u = 2^-24.
 *
 * The CUDA back end computes powers as 2^(k log2 x) with the hardware's approximations, whose
 * errors the PTX ISA gives: lg2, ex2 and a quick quotient or root 2^-22 of the result, lg2 of 1/2
 * .. 2 an absolute 2^-22. So codes may be neighbours of the exact ones, and k may differ if the
 * exact one is close to a multiple of 1/16. */
#include "kernels/fp8.h"
#include "kernels/values.h"
#include "tests/test.h"
#include "tests/fp8.h"

static const Format F = { F32, 0 };
enum { GROUP = 128 };

static double top_of(DType d)
{
    return fp8_table(d)[fp8_last(d)];
}

/* Makes a moment of zeros: codes 0 and scales 0, as in new memory. */
static Tensor make_moment(DType d, int n, bool expand)
{
    Tensor t = make(format_of_moment((Format){ d, GROUP, expand }), 1, n);
    device_zero(t.data, (size_t)n);
    device_zero(t.scale, tensor_bytes(t) - (size_t)n);
    return t;
}

/* Makes values as in optimizers: their sizes span `decades` powers of ten, and differ between
 * groups. */
static Tensor make_spread(int n, double decades)
{
    Tensor t = make(F, 1, n);
    float *x = keep((size_t)n * sizeof *x);
    for (int i = 0; i < n; i++) {
        double size = pow(10, -4 - i / GROUP % 5 - decades * uniform(21, (size_t)i, 0, 1));
        x[i] = (float)(i % 2 ? size : -size);
    }
    put(t, x);
    return t;
}

/* ---- the map --------------------------------------------------------------------------------- */

/* The scale of a group, and k if the format is expanded. Otherwise k = 1, and the map is x/S. */
typedef struct {
    double S, k;
} Pair;

static Pair pair_of(Format f, const uint16_t *scales, int i)
{
    if (!f.expand)
        return (Pair){ float_from_bits((uint32_t)scales[i / GROUP] << 16), 1 };
    const uint32_t pair = ((const uint32_t *)scales)[i / GROUP];
    return (Pair){ float_from_bits((pair & 0xffffff) << 7), ((pair >> 24) + 1) / 16.0 };
}

/* f(x) = (|x|/a)^k max, a = S max, is monotonic, and so is its inverse. */
static double map(double x, Pair p, DType d)
{
    return pow(fabs(x) / (p.S * top_of(d)), p.k) * top_of(d);
}

static double unmap(double f, Pair p, DType d)
{
    return pow(f / top_of(d), 1 / p.k) * p.S * top_of(d);
}

static double log2_size(double x)
{
    return x == 0 ? 0 : fabs(log2(fabs(x)));
}

/* Relative errors of map and unmap when computed in F32, as powers or as
 *     2^(k log2 x + (1-k) log2 max - k log2 S) and 2^((1/k) log2 f + log2 S + (1-1/k) log2 max),
 * where an error of the exponent counts ln 2 < 0.7 times. Errors: a logarithm L 2^-22 (L + 1), 1/k
 * 2^-22 of itself, 2^x 2^-22; products and sums u = 2^-22/4 of terms whose sum is less than twice
 * these. Without expansion there are two roundings. */
static double map_error(double x, Pair p, Format f)
{
    const double terms =
        p.k * (log2_size(x) + log2_size(p.S) + 2) + fabs(1 - p.k) * log2(top_of(f.dtype));
    return f.expand ? 0x1p-21 * (1 + terms) : 3 * U24;
}

static double unmap_error(double code, Pair p, Format f)
{
    const double terms =
        (log2_size(code) + log2(top_of(f.dtype)) + 1) / p.k + log2(top_of(f.dtype));
    return f.expand ? 0x1p-21 * (2 + 2 * terms + log2_size(p.S)) : 2 * U24;
}

/* Returns the decoded values of a moment. */
static double *moment_values(Tensor t, const void *snapshot)
{
    const uint8_t *codes = snapshot;
    double *x = keep((size_t)t.cols * sizeof *x);
    for (int i = 0; i < t.cols; i++) {
        const double f = fp8_table(t.format.dtype)[codes[i]];
        const Pair p = pair_of(t.format, (const uint16_t *)(codes + t.cols), i);
        x[i] = f == 0 ? 0 : copysign(unmap(fabs(f), p, t.format.dtype), f);
    }
    return x;
}

/* k = floor(16 log2(max^2/2) / log2(a/b)) / 16, between 1/16 and 16, where the largest and smallest
 * of the group lie in the ranges a and b. The CPU computes it in double. The hardware's
 * approximations have errors of 2^-22 of a/b, and k is below 16 if log2(a/b) > 1: 1e-6 in total;
 * 1e-5 is safe. */
static void check_power(const char *name, double k, Range a, Range b, DType d)
{
    const double range = log2(top_of(d) * top_of(d) / 2), doubt = on_cpu() ? 0 : 1e-5;
    const double wide = log2((a.high + 1e-20) / (b.low + 1e-20)),
                 narrow = log2((a.low + 1e-20) / (b.high + 1e-20));
    const double least = wide > 0 ? floor(range / wide * 16 * (1 - doubt)) / 16 : 16;
    const double most = narrow > 0 ? floor(range / narrow * 16 * (1 + doubt)) / 16 : 16;
    if (!(k >= fmin(fmax(least, 1.0 / 16), 16) && k <= fmin(fmax(most, 1.0 / 16), 16) &&
          k * 16 == floor(k * 16)))
        fail_msg("%s: k = %g, expected %g .. %g, between 1/16 and 16", name, k, least, most);
}

/* Checks group g of a moment whose values lie within `bound` of x. S is max|x| / max, rounded up to
 * BF16, which adds less than 2^-7, with k less than 2^-16. Each code lies between the codes of the
 * ends of the allowed range. */
static void check_group(const char *name, Tensor t, const uint8_t *codes, int g, const double *x,
                        const double *bound)
{
    const DType d = t.format.dtype;
    const Pair p = pair_of(t.format, (const uint16_t *)(codes + t.cols), g * GROUP);
    const Range a = amax_range(x + g * GROUP, bound + g * GROUP, GROUP);
    Range b = { INFINITY, INFINITY };
    for (int i = g * GROUP; i < (g + 1) * GROUP; i++) {
        b.low = fmin(b.low, fmax(fabs(x[i]) - bound[i], 0));
        b.high = fmin(b.high, fabs(x[i]) + bound[i]);
    }
    const double up = t.format.expand ? 0x1p-16 : 0x1p-7;
    if (!(p.S * top_of(d) >= a.low * (1 - 2 * U24) &&
          p.S * top_of(d) <= a.high * (1 + up) * (1 + 2 * U24)))
        fail_msg("%s, group %d: scale %g for a maximum of %.9g .. %.9g", name, g, p.S, a.low,
                 a.high);
    if (t.format.expand)
        check_power(name, p.k, a, b, d);
    for (int i = g * GROUP; i < (g + 1) * GROUP; i++) {
        const double low = map(fmax(fabs(x[i]) - bound[i], 0), p, d),
                     high = map(fabs(x[i]) + bound[i], p, d);
        const uint8_t least = fp8_nearest(low * (1 - map_error(x[i], p, t.format)), d);
        const uint8_t most = fp8_nearest(high * (1 + map_error(x[i], p, t.format)), d);
        const double code = fp8_table(d)[codes[i]];
        if (!(fabs(code) >= fp8_table(d)[least] && fabs(code) <= fp8_table(d)[most]) ||
            (code != 0 && fabs(x[i]) > bound[i] && signbit(code) != signbit(x[i])))
            fail_msg("%s[%d]: code %02x, expected %02x .. %02x and the sign of %.9g +- %.3g; S = "
                     "%g, k = %g",
                     name, i, codes[i], least, most, x[i], bound[i], p.S, p.k);
    }
}

static void check_moment(const char *name, Tensor t, const double *x, const double *bound)
{
    const uint8_t *codes = tensor_snapshot(t);
    for (int g = 0; g < t.cols / GROUP; g++)
        check_group(name, t, codes, g, x, bound);
}

/* ---- there and back -------------------------------------------------------------------------- */

/* With beta1 = 0 the stored moment is the gradient; with beta1 = 1, grad = 0, v = 0, eps = 1, lr =
 * 1 and w = 0 the new w is minus the decoded moment. stored: a snapshot of the moment between the
 * two. */
static double *through_moment(Tensor m, Tensor x, void **stored)
{
    const int n = x.cols;
    AdamW a = { .lr = 0,
                .beta1 = 0,
                .beta2 = 1,
                .eps = 1,
                .correction1 = 1,
                .correction2 = 1,
                .grad_scale = 1 };
    Tensor w = make_filled(F, 1, n, 0, 0, 0), zero = make_filled(F, 1, n, 0, 0, 0);
    Tensor v = make_moment(m.format.dtype, n, m.format.expand);
    adamw(w, m, v, x, a, 0);
    *stored = tensor_snapshot(m);
    a.beta1 = 1, a.lr = 1;
    adamw(w, m, v, zero, a, 0);
    double *back = values(w);
    for (int i = 0; i < n; i++)
        back[i] = -back[i];
    return back;
}

static void check_back(const char *name, Tensor m, const void *stored, const double *back)
{
    const uint8_t *codes = stored;
    const double *expected = moment_values(m, stored);
    for (int i = 0; i < m.cols; i++) {
        const Pair p = pair_of(m.format, (const uint16_t *)(codes + m.cols), i);
        const double error = unmap_error(fp8_table(m.format.dtype)[codes[i]], p, m.format) +
                             (on_cpu() ? 0 : 0x1p-22);
        if (!(fabs(back[i] - expected[i]) <= error * fabs(expected[i])))
            fail_msg("%s[%d]: %.9g comes back, expected %.9g with a relative error below %g", name,
                     i, back[i], expected[i], error);
    }
}

TEST(test_there_and_back)
{
    static const double decades[] = { 0.1, 2, 6, 12 };
    for (int i = 0; i < 16; i++) {
        const int n = 20 * GROUP;
        const Format f = { i % 2 ? E5M2 : E4M3, GROUP, i / 2 % 2 };
        char name[64];
        void *stored;
        snprintf(name, sizeof name, "moments/%s/%g-decades", format_name(f), decades[i / 4]);
        Tensor x = make_spread(n, decades[i / 4]), m = make_moment(f.dtype, n, f.expand);
        const double *X = values(x), *back = through_moment(m, x, &stored),
                     *none = keep((size_t)n * sizeof *none);
        tensor_restore(m, stored);
        check_moment(name, m, X, none);
        check_back(name, m, stored, back);
        release();
    }
}

/* Without expansion, a moment equals the host's encoding. Zeros stay zeros, with and without
 * expansion. */
TEST(test_plain_and_zeros)
{
    enum { N = 64 * GROUP };
    void *stored;
    for (DType d = E4M3; d <= E5M2; d++) {
        Tensor x = make_spread(N, 3), m = make_moment(d, N, false);
        uint8_t *expected = keep(tensor_bytes(m));
        through_moment(m, x, &stored);
        tensor_store(
            (Tensor){
                .data = expected, .scale = expected + N, .format = m.format, .rows = 1, .cols = N },
            0, tensor_snapshot(x), N);
        check_same_bytes("moments without expansion", stored, expected, tensor_bytes(m));
        if (!on_cpu())
            DIES("is a format of moments, which only adamw reads and writes", quantize(m, x));
        m.format.bf16_scale = false;
        DIES("with one byte of scale per group", adamw(x, m, m, x, (AdamW){ 0 }, 0));
        for (int expand = 0; expand < 2; expand++) {
            const double *back =
                through_moment(make_moment(d, N, expand), make_filled(F, 1, N, 0, 0, 0), &stored);
            for (int i = 0; i < N; i++)
                assert_true(back[i] == 0);
        }
        release();
    }
}

/* ---- steps ----------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    Format w, grad, m, v;
} StepCase;
// clang-format off
static const StepCase steps[] = {
    { "e4m3",     { BF16, 0 }, { BF16, 0 }, { E4M3, GROUP, true }, { E4M3, GROUP, true } },
    { "mixed",    { F32, 0 },  { F32, 0 },  { E4M3, GROUP, true }, { E5M2, GROUP, true } },
    { "e5m2",     { F32, 0 },  { BF16, 0 }, { E5M2, GROUP, true }, { E5M2, GROUP, true } },
    { "plain",    { BF16, 0 }, { F32, 0 },  { E4M3, GROUP, false }, { E4M3, GROUP, false } },
    { "plain-e5", { F32, 0 },  { BF16, 0 }, { E5M2, GROUP, false }, { E5M2, GROUP, false } },
    { "m-bf16",   { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, { E4M3, GROUP, true } },
    { "m-f32",    { F32, 0 },  { F32, 0 },  { F32, 0 }, { E5M2, GROUP, false } },
    { "v-bf16",   { BF16, 0 }, { BF16, 0 }, { E4M3, GROUP, false }, { BF16, 0 } },
    { "v-f32",    { F32, 0 },  { BF16, 0 }, { E5M2, GROUP, true }, { F32, 0 } },
};
// clang-format on

/* Makes the same bits on both back ends: finite codes, scales around `size`, powers up to 6. */
static Tensor make_state(Format f, int n, uint64_t seed, double size, bool positive)
{
    if (!format_is_fp8(f))
        return make_filled(f, 1, n, seed, positive ? 0 : (float)-size, (float)size);
    Tensor t = make_moment(f.dtype, n, f.expand);
    uint8_t *bytes = keep(tensor_bytes(t));
    for (int i = 0; i < n; i++)
        bytes[i] = (uint8_t)(random_bits(seed, (uint64_t)i) % (uint64_t)(fp8_last(f.dtype) + 1));
    for (int i = 1; !positive && i < n; i += 2)
        bytes[i] |= 0x80;
    for (int g = 0; g < n / GROUP; g++) {
        uint32_t u;
        float S = (float)(size / top_of(f.dtype)) * uniform(seed + 1, (size_t)g, 0.1f, 1);
        memcpy(&u, &S, sizeof u);
        if (f.expand)
            ((uint32_t *)(bytes + n))[g] =
                u >> 7 | (uint32_t)(random_bits(seed + 2, (uint64_t)g) % 96) << 24;
        else
            ((uint16_t *)(bytes + n))[g] = (uint16_t)(u >> 16);
    }
    tensor_restore(t, bytes);
    return t;
}

static double *state_values(Tensor t)
{
    return format_is_fp8(t.format) ? moment_values(t, tensor_snapshot(t)) : values(t);
}

/* Error bounds of the decoded moment; 0 if the moment is not FP8. */
static double *moment_bounds(Tensor t, const double *x)
{
    const uint8_t *codes = tensor_snapshot(t);
    double *bound = keep((size_t)t.cols * sizeof *bound);
    for (int i = 0; i < t.cols && format_is_fp8(t.format); i++)
        bound[i] = fabs(x[i]) *
                   unmap_error(fp8_table(t.format.dtype)[codes[i]],
                               pair_of(t.format, (const uint16_t *)(codes + t.cols), i), t.format);
    return bound;
}

/* As in AdamW with plain moments: m has an error of 4 u of its two terms, v of 6 u, plus errors of
 * the old moments. An approximate root has an error of 2^-22, an approximate quotient 2^-22,
 * products with 1/c 2 u each: 16 u in total. */
static void adam_reference(double *w, double *m, double *v, double *bw, double *bm, double *bv,
                           double grad, AdamW a)
{
    double g = a.grad_scale * grad, b1 = a.beta1, b2 = a.beta2, c1 = 1 - a.beta1, c2 = 1 - a.beta2;
    *bm = b1 * *bm + 4 * U24 * (fabs(b1 * *m) + fabs(c1 * g));
    *m = b1 * *m + c1 * g;
    *bv *= b2;
    *v = b2 * *v + c2 * g * g;
    *bv += 6 * U24 * *v;
    const double below = sqrt(*v / a.correction2) + a.eps, q = *m / a.correction1 / below;
    const double least = sqrt((*v - *bv) / a.correction2) + a.eps;
    *bw = a.lr * (*bm / a.correction1 / least + fabs(q) * (below / least - 1) + 16 * U24 * fabs(q) +
                  3 * U24 * fabs(a.weight_decay * *w)) +
          3 * U24 * fabs(*w);
    *w -= a.lr * (q + a.weight_decay * *w);
}

/* Compares the decoded moments in F32. Both back ends store values within `bound` of the same
 * value. A value has an error of half the distance of the codes around it, and so has the whole
 * group if its scale or power differs. So the bound is the distance to the neighbouring codes, or
 * twice this distance if both may round. */
static void golden_moment(const char *name, Tensor t, const double *bound)
{
    const uint8_t *codes = tensor_snapshot(t);
    const double *value = fp8_table(t.format.dtype), *x = moment_values(t, codes);
    float *decoded = keep((size_t)t.cols * sizeof *decoded);
    double *wider = keep((size_t)t.cols * sizeof *wider);
    Tensor plain = make(F, 1, t.cols);
    for (int i = 0; i < t.cols; i++) {
        const int c = codes[i] & 0x7f, last = fp8_last(t.format.dtype);
        const Pair p = pair_of(t.format, (const uint16_t *)(codes + t.cols), i);
        const double below = c ? unmap(value[c - 1], p, t.format.dtype) : 0;
        const double above = unmap(value[c < last ? c + 1 : last], p, t.format.dtype);
        decoded[i] = (float)x[i];
        wider[i] =
            fmax(above - fabs(x[i]), fabs(x[i]) - below) / 2 + bound[i] + 0x1p-8 * fabs(x[i]);
    }
    put(plain, decoded);
    golden_check(name, plain, wider);
}

static void check_state(const char *name, Tensor t, const double *x, const double *bound)
{
    if (format_is_fp8(t.format)) {
        check_moment(name, t, x, bound);
        golden_moment(name, t, bound);
    } else {
        check_close(name, t, x, bound);
        golden_check(name, t, bound);
    }
}

static void step_case(const StepCase *k)
{
    enum { N = 20 * GROUP }; /* not a multiple of a thread block */
    const AdamW a = { .lr = 0.01f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .weight_decay = 0.1f,
                      .correction1 = 0.19f,
                      .correction2 = 0.0975f,
                      .grad_scale = 0.5f,
                      .seed = 42 };
    Tensor w = make_filled(k->w, 1, N, 1, -1, 1),
           grad = make_filled(k->grad, 1, N, 4, -1e-2f, 1e-2f);
    Tensor m = make_state(k->m, N, 2, 1e-3, false), v = make_state(k->v, N, 3, 1e-5, true);
    double *W = values(w), *G = values(grad), *M = state_values(m), *V = state_values(v),
           *bw = keep(N * sizeof *bw);
    double *bm = moment_bounds(m, M), *bv = moment_bounds(v, V);
    char text[64];
    TWICE(adamw(w, m, v, grad, a, 768), w, m, v);
    for (int i = 0; i < N; i++) {
        adam_reference(&W[i], &M[i], &V[i], &bw[i], &bm[i], &bv[i], G[i], a);
        /* rounded up or down, by less than an ulp, which is twice the unit roundoff */
        if (k->w.dtype == BF16)
            bw[i] += 0x1p-8 * fabs(W[i]);
    }
    snprintf(text, sizeof text, "fp8-adamw/%s-w", k->text);
    check_close(text, w, W, bw);
    golden_check(text, w, bw);
    snprintf(text, sizeof text, "fp8-adamw/%s-m", k->text);
    check_state(text, m, M, bm);
    snprintf(text, sizeof text, "fp8-adamw/%s-v", k->text);
    check_state(text, v, V, bv);
    release();
}

static double sum_of_moment(Tensor t)
{
    char *bytes = tensor_snapshot(t);
    float *x = keep((size_t)t.cols * sizeof *x);
    double sum = 0;
    const Tensor moment = {
        .data = bytes, .scale = bytes + t.cols, .format = t.format, .rows = 1, .cols = t.cols
    };
    tensor_load(x, moment, 0, (size_t)t.cols);
    for (int i = 0; i < t.cols; i++)
        sum += x[i];
    return sum;
}

/* 1000 steps without a gradient at beta2 = 0.999 reduce v to e^-1 of itself; a scale too coarse for
 * 2^-10 per step would not change. */
TEST(test_slow_decay)
{
    enum { N = 8 * GROUP, STEPS = 1000 };
    Tensor w = make_filled(F, 1, N, 1, -1, 1), grad = make_filled(F, 1, N, 2, -1, 1),
           none = make_filled(F, 1, N, 3, 0, 0);
    Tensor m = make_moment(E4M3, N, true), v = make_moment(E4M3, N, true);
    AdamW a = { .lr = 0,
                .beta1 = 0.9f,
                .beta2 = 0.999f,
                .eps = 1e-8f,
                .correction1 = 1,
                .correction2 = 1,
                .grad_scale = 1 };
    tensor_restore(m, keep(tensor_bytes(m)));
    tensor_restore(v, keep(tensor_bytes(v)));
    adamw(w, m, v, grad, a, 0);
    const double before = sum_of_moment(v);
    for (int s = 0; s < STEPS; s++)
        adamw(w, m, v, none, a, 0);
    const double left = sum_of_moment(v) / before, expected = pow(0.999, STEPS);
    printf("v went to %.4f of itself, expected %.4f\n", left, expected);
    assert_true(fabs(left / expected - 1) < 0.1);
    release();
}

TEST(test_steps)
{
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        step_case(&steps[i]);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
