/* The rotation where it meets FP8: forward from q, k, v saved in groups of 16, backward into an operand of E5M2.
 * Against a double reference computed from the stored codes, and on CUDA against the CPU's record too. u = 2^-24.
 *
 * With a clip or with norms the CUDA back end passes through BF16: x on its way in, dx before it becomes FP8. Both
 * may then be off by v = 2^-8 of themselves. */
#include "tests/fp8.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E5 = { E5M2, 0 }, E16 = { E4M3, 16 };

typedef struct { const char *text; int heads, kv_heads, width; float clip; bool norm; } RopeCase;
static const RopeCase cases[] = {
    { "64-gqa", 4, 2, 64, 0, false },       { "128-gqa", 3, 1, 128, 0, false },    { "32-gqa", 3, 1, 32, 0, false },
    { "64-mha", 2, 2, 64, 0, false },       { "64-clip", 4, 2, 64, 1.5f, false },  { "64-norm", 4, 2, 64, 0, true },
    { "128-clip-norm", 3, 1, 128, 1.5f, true }, { "32-norm", 3, 1, 32, 0, true },
};
enum { CASES = sizeof cases / sizeof cases[0] };

static char label[96];
static const char *name(const char *op, int N, const RopeCase *k)
{
    snprintf(label, sizeof label, "fp8-%s/%d/%s", op, N, k->text);
    return label;
}

static double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

/* What BF16 adds on the way; 0 where there is none. */
static double passing_error(const RopeCase *k)
{
    return !on_cpu() && (k->clip > 0 || k->norm) ? 0x1p-8 : 0;
}

static double clamp(double x, double limit)
{
    return limit > 0 ? fmin(fmax(x, -limit), limit) : x;
}

/* BF16, groups of 16 of different sizes, so that a wrong scale shows. */
static Tensor make_uneven(int rows, int cols, uint64_t seed, float size)
{
    Tensor t = make(H, rows, cols);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++)
        x[i] = ldexpf(uniform(seed, i, -size, size), (int)(random_bits(seed + 100, i / 16) % 5) - 2);
    put(t, x);
    return t;
}

/* Turns heads by sign * angle; b: what the values may err, before and after. Two products and a sum round. */
static void turn(double *x, double *b, int heads, int D, const float *angles, double sign)
{
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < D / 2; i++) {
            const int p = h * D + i, q = p + D / 2;
            const double c = angles[2 * i], s = sign * angles[2 * i + 1], xp = x[p], xq = x[q], bp = b[p], bq = b[q];
            x[p] = xp * c - xq * s;
            x[q] = xp * s + xq * c;
            b[p] = fabs(c) * bp + fabs(s) * bq + 3 * U24 * (fabs(xp * c) + fabs(xq * s));
            b[q] = fabs(s) * bp + fabs(c) * bq + 3 * U24 * (fabs(xp * s) + fabs(xq * c));
        }
}

/* rstd of u, whose elements are v off relatively: so is their root mean square; the sum of W squares errs by W u. */
static double rstd_of(const double *x, int W, double clip, double eps)
{
    double square = 0;
    for (int i = 0; i < W; i++)
        square += clamp(x[i], clip) * clamp(x[i], clip) / W;
    return 1 / sqrt(square + eps);
}

static double rstd_error(double rstd, int W, double v)
{
    return rstd * ((W + 8) * U24 / 2 + 6 * U24 + v * (1 + 2 * v));
}

typedef struct { Attention a; const float *angles; const double *qw, *kw; double v; } Setting;

/* ---- forward ------------------------------------------------------------------------------------------------- */

/* In q or k: y = u r w; errors of u and r, to second order, and two roundings. */
static void norm_part(double *y, double *b, double *rstd, double *b_rstd, int W, const double *w, double eps,
                      double v)
{
    *rstd = rstd_of(y, W, 0, eps);
    *b_rstd = rstd_error(*rstd, W, v);
    for (int i = 0; i < W; i++) {
        b[i] = (b[i] * (*rstd + *b_rstd) + fabs(y[i]) * *b_rstd) * fabs(w[i]);
        y[i] *= *rstd * w[i];
        b[i] += 3 * U24 * fabs(y[i]);
    }
}

static void forward_reference(double *y, double *b, double *stats, double *bs, const double *x, int N, Setting s)
{
    const Attention a = s.a;
    const int Q = a.H * a.D, K = a.K * a.D, width = Q + 2 * K;
    for (int n = 0; n < N; n++, x += width, y += width, b += width, stats += 2, bs += 2) {
        const float *angles = s.angles + (size_t)(n % a.T) * (size_t)a.D;
        for (int i = 0; i < width; i++) {
            y[i] = clamp(x[i], a.clip);
            b[i] = s.v * fabs(y[i]);        /* the limit is a BF16 number: rounding does not carry x across it */
        }
        if (s.qw) {
            norm_part(y, b, stats, bs, Q, s.qw, a.norm.eps, s.v);
            norm_part(y + Q, b + Q, stats + 1, bs + 1, K, s.kw, a.norm.eps, s.v);
        }
        turn(y, b, a.H, a.D, angles, 1);
        turn(y + Q, b + Q, a.K, a.D, angles, 1);
    }
}

static void forward_case(const RopeCase *k, Tensor x, Tensor qw, Tensor kw, Setting s)
{
    const int N = x.rows;
    const size_t n = tensor_numel(x), rows = (size_t)N;
    Tensor y = make(H, N, x.cols), stats = make_filled(F, N, 2, 0, 0, 0);
    double *ref = doubles(n), *bound = doubles(n), *ref_stats = doubles(2 * rows), *bs = doubles(2 * rows);
    TWICE(rope_forward(y, k->norm ? stats.data : NULL, x, qw, kw, s.a), y, stats);
    forward_reference(ref, bound, ref_stats, bs, values(x), N, s);
    check_close(name("rope_forward", N, k), y, ref, bound);
    golden_check(label, y, bound);
    if (k->norm) {
        check_close(name("rope_stats", N, k), stats, ref_stats, bs);
        golden_check(label, stats, bs);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* In q or k, from the gradient g of the norm's output, off by b: d = r (g w - h mean(g w h)), dw += g h. h = u r is
 * off by e = v + 2 u of itself, a mean of W terms by W u; all of it to second order. */
static void norm_part_backward(double *g, double *b, double *dw, double *bw, const double *x, const double *w, int W,
                               int N, double clip, double r, double v)
{
    const double e = v + 2 * U24;
    double mean = 0, b_mean = 0;
    for (int i = 0; i < W; i++) {
        const double h = clamp(x[i], clip) * r;
        mean += g[i] * w[i] * h / W;
        b_mean += (b[i] * (1 + e) + fabs(g[i]) * (e + (W + 8) * U24)) * fabs(w[i] * h) / W;
        dw[i] += g[i] * h;
        bw[i] += (b[i] * (1 + e) + fabs(g[i]) * (e + (N + 5) * U24)) * fabs(h);
    }
    for (int i = 0; i < W; i++) {
        const double h = clamp(x[i], clip) * r, gw = g[i] * w[i];
        g[i] = r * (gw - h * mean);
        b[i] = r * (b[i] * fabs(w[i]) + fabs(h) * (b_mean * (1 + e) + fabs(mean) * e)
                    + 5 * U24 * (fabs(gw) + fabs(h) * (fabs(mean) + b_mean)));
    }
}

/* g: dy, becomes dx; b: 0, becomes its bound. An x beyond the limit that BF16 may round to it may count as not
 * clamped. */
static void backward_reference(double *g, double *b, double *dw, double *bw, const double *x, const float *stats,
                               int N, Setting s)
{
    const Attention a = s.a;
    const int Q = a.H * a.D, K = a.K * a.D, width = Q + 2 * K;
    for (int n = 0; n < N; n++, x += width, g += width, b += width) {
        const float *angles = s.angles + (size_t)(n % a.T) * (size_t)a.D;
        turn(g, b, a.H, a.D, angles, -1);
        turn(g + Q, b + Q, a.K, a.D, angles, -1);
        if (s.qw) {
            norm_part_backward(g, b, dw, bw, x, s.qw, Q, N, a.clip, stats[2 * n], s.v);
            norm_part_backward(g + Q, b + Q, dw + Q, bw + Q, x + Q, s.kw, K, N, a.clip, stats[2 * n + 1], s.v);
        }
        for (int i = 0; i < width; i++) {
            const bool beyond = a.clip > 0 && fabs(x[i]) > a.clip;
            const bool rounds = beyond && fabs(x[i]) <= a.clip * (1 + s.v);
            b[i] = beyond && !rounds ? 0 : b[i] + s.v * (fabs(g[i]) + b[i]) + (rounds ? fabs(g[i]) : 0);
            g[i] = beyond ? 0 : g[i];
        }
    }
}

static void check_weights(const char *op, int N, const RopeCase *k, Tensor t, const double *ref, const double *bound)
{
    check_close(name(op, N, k), t, ref, bound);
    golden_check(label, t, bound);
}

static void backward_case(const RopeCase *k, Tensor x, Tensor qw, Tensor kw, Setting s)
{
    const int N = x.rows, Q = s.a.H * s.a.D, K = s.a.K * s.a.D;
    const size_t n = tensor_numel(x), turned = (size_t)(Q + K);
    Tensor dy = make_uneven(N, x.cols, 4, 1), dx = make_operand(E5, N, x.cols), stats = make_f32(N, 2);
    Tensor dqw = k->norm ? make_filled(F, 1, Q, 5, -1, 1) : NONE;
    Tensor dkw = k->norm ? make_filled(F, 1, K, 6, -1, 1) : NONE;
    double *ref = values(dy), *bound = doubles(n), *dw = doubles(turned), *bw = doubles(turned);
    const double *X = values(x), *old_q = values(dqw), *old_k = values(dkw);
    float *given = keep(2 * (size_t)N * sizeof *given);
    for (int i = 0; i < N; i++) {
        given[2 * i] = (float)rstd_of(X + i * x.cols, Q, k->clip, s.a.norm.eps);
        given[2 * i + 1] = (float)rstd_of(X + i * x.cols + Q, K, k->clip, s.a.norm.eps);
    }
    put(stats, given);
    for (int i = 0; k->norm && i < Q + K; i++) {
        dw[i] = i < Q ? old_q[i] : old_k[i - Q];
        bw[i] = (N + 4) * U24 * fabs(dw[i]);
    }
    TWICE(rope_backward(dx, dqw, dkw, dy, x, k->norm ? stats.data : NULL, qw, kw, s.a), dx, dqw, dkw, dy);
    backward_reference(ref, bound, dw, bw, X, given, N, s);
    check_operand(name("rope_backward", N, k), dx, ref, bound);
    check_transposed(label, dx);
    golden_operand(label, dx, ref, bound);
    if (k->norm) {
        check_weights("rope_dqnorm", N, k, dqw, dw, bw);
        check_weights("rope_dknorm", N, k, dkw, dw + Q, bw + Q);
    }
}

static float *make_angles(int T, int D)
{
    float *angles = keep(sizeof *angles * (size_t)(T * D));
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D / 2; i++) {
            const double angle = t * pow(10000, -2.0 * i / D);
            angles[t * D + 2 * i] = (float)cos(angle);
            angles[t * D + 2 * i + 1] = (float)sin(angle);
        }
    return angles;
}

static void rope_case(int N, const RopeCase *k)
{
    const int Q = k->heads * k->width, K = k->kv_heads * k->width, T = N / 2;
    Tensor x = make(E16, N, Q + 2 * K), table = make_f32(T, k->width);
    Tensor qw = k->norm ? make_filled(H, 1, Q, 2, 0.5f, 1.5f) : NONE;
    Tensor kw = k->norm ? make_filled(H, 1, K, 3, 0.5f, 1.5f) : NONE;
    const float *angles = make_angles(T, k->width);
    const Attention a = { .B = 2, .T = T, .H = k->heads, .K = k->kv_heads, .D = k->width, .clip = k->clip,
                          .norm = { RMS_NORM, 1e-5f }, .rope = table.data };
    const Setting s = { a, angles, values(qw), values(kw), passing_error(k) };
    put(table, angles);
    quantize(x, make_uneven(N, Q + 2 * K, 1, 2));
    forward_case(k, x, qw, kw, s);
    backward_case(k, x, qw, kw, s);
    release();
}

static void test_rope(void **state)
{
    (void)state;
    for (int k = 0; k < CASES; k++) {
        rope_case(16, &cases[k]);
        rope_case(96, &cases[k]);
        rope_case(160, &cases[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_rope) };
    return cmocka_run_group_tests(tests, start_device, NULL);
}
