/* The rotation with FP8: forward from q, k, v that are saved in groups of 16, backward into an E5M2
 * operand. The results are compared with a double reference that is computed from the stored codes,
 * on CUDA also with the CPU's record. u = 2^-24.
 *
 * With a clip or with norms the CUDA back end converts x and dx through BF16. Both may then have a
 * relative error of v = 2^-8. */
#include "tests/test.h"
#include "tests/fp8.h"
#include "tests/rotate.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E5 = { E5M2, 0 }, E16 = { E4M3, 16 };

typedef enum { NO_NORM, WHOLE, BY_HEAD } Norms;
typedef struct {
    const char *text;
    int heads, kv_heads, width;
    float clip;
    Norms norm;
} RopeCase;
// clang-format off
static const RopeCase cases[] = {
    { "64-gqa", 4, 2, 64, 0, NO_NORM },     { "128-gqa", 3, 1, 128, 0, NO_NORM },   { "32-gqa", 3, 1, 32, 0, NO_NORM },
    { "64-mha", 2, 2, 64, 0, NO_NORM },     { "64-clip", 4, 2, 64, 1.5f, NO_NORM }, { "64-norm", 4, 2, 64, 0, WHOLE },
    { "128-clip-norm", 3, 1, 128, 1.5f, WHOLE }, { "32-norm", 3, 1, 32, 0, WHOLE },
    { "16-heads", 4, 2, 16, 0, BY_HEAD },   { "24-heads", 4, 2, 24, 0, BY_HEAD },   { "64-heads", 4, 2, 64, 0, BY_HEAD },
    { "128-heads", 3, 1, 128, 0, BY_HEAD }, { "64-clip-heads", 2, 2, 64, 1.5f, BY_HEAD },
};
// clang-format on
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

/* Returns the error from the conversion to BF16; 0 if there is none. */
static double passing_error(const RopeCase *k)
{
    return !on_cpu() && (k->clip > 0 || k->norm) ? 0x1p-8 : 0;
}

/* Error of rstd of u. The elements of u have a relative error of v, and so has their root mean
 * square. The sum of W squares has an error of W u. */
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

/* q_norms, k_norms: number of equal ranges of q and k; each range has its norm */
typedef struct {
    Attention a;
    const float *angles;
    const double *qw, *kw;
    int q_norms, k_norms;
    double v;
} Setting;

static Setting setting_of(const RopeCase *k, Attention a, const float *angles, Tensor qw, Tensor kw)
{
    const bool by_head = k->norm == BY_HEAD;
    return (Setting){
        a, angles, values(qw), values(kw), by_head ? a.H : 1, by_head ? a.K : 1, passing_error(k)
    };
}

/* ---- forward --------------------------------------------------------------------------------- */

/* In a range of q or k: y = u r w. Errors of u and r, to second order, and two roundings. */
static void norm_part(double *y, double *b, double *rstd, double *b_rstd, int W, const double *w,
                      double eps, double v)
{
    *rstd = rstd_of(y, W, 0, eps);
    *b_rstd = rstd_error(*rstd, W, v);
    for (int i = 0; i < W; i++) {
        b[i] = (b[i] * (*rstd + *b_rstd) + fabs(y[i]) * *b_rstd) * fabs(w[i]);
        y[i] *= *rstd * w[i];
        b[i] += 3 * U24 * fabs(y[i]);
    }
}

static void forward_reference(double *y, double *b, double *stats, double *bs, const double *x,
                              int N, Setting s)
{
    const Attention a = s.a;
    const int Q = a.H * a.D, K = a.K * a.D, width = Q + 2 * K, q_width = Q / s.q_norms,
              k_width = K / s.k_norms;
    for (int n = 0; n < N; n++, x += width, y += width, b += width) {
        const float *angles = s.angles + (size_t)(n % a.T) * (size_t)a.D;
        for (int i = 0; i < width; i++) {
            y[i] = clamp(x[i], a.clip);
            /* the limit is a BF16 number, so rounding does not move x across it */
            b[i] = s.v * fabs(y[i]);
        }
        for (int i = 0; s.qw && i < s.q_norms; i++)
            norm_part(y + i * q_width, b + i * q_width, stats++, bs++, q_width, s.qw, a.norm.eps,
                      s.v);
        for (int i = 0; s.kw && i < s.k_norms; i++)
            norm_part(y + Q + i * k_width, b + Q + i * k_width, stats++, bs++, k_width, s.kw,
                      a.norm.eps, s.v);
        rotate(y, b, a.H, a.D, angles, 1);
        rotate(y + Q, b + Q, a.K, a.D, angles, 1);
    }
}

static void forward_case(const RopeCase *k, Tensor x, Tensor qw, Tensor kw, Setting s)
{
    const int N = x.rows;
    const size_t n = tensor_numel(x);
    Tensor y = make(H, N, x.cols), stats = make_filled(F, N, s.q_norms + s.k_norms, 0, 0, 0);
    double *ref = doubles(n), *bound = doubles(n), *ref_stats = doubles(tensor_numel(stats)),
           *bs = doubles(tensor_numel(stats));
    TWICE(rope_forward(y, x, k->norm ? stats.data : NULL, x, NO_PRODUCT, qw, kw, s.a, FROM_SAVED),
          y, stats);
    forward_reference(ref, bound, ref_stats, bs, values(x), N, s);
    check_close(name("rope_forward", N, k), y, ref, bound);
    golden_check(label, y, bound);
    if (k->norm) {
        check_close(name("rope_stats", N, k), stats, ref_stats, bs);
        golden_check(label, stats, bs);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* In a range of q or k, from the gradient g of the norm's output, which has the error b: d = r (g w
 * - h mean(g w h)), dw += g h, as one of `terms` terms. h = u r has a relative error of e = v + 2
 * u; a mean of W terms has an error of W u. To second order. */
static void norm_part_backward(double *g, double *b, double *dw, double *bw, const double *x,
                               const double *w, int W, int terms, double clip, double r, double v)
{
    const double e = v + 2 * U24;
    double mean = 0, b_mean = 0;
    for (int i = 0; i < W; i++) {
        const double h = clamp(x[i], clip) * r;
        mean += g[i] * w[i] * h / W;
        b_mean += (b[i] * (1 + e) + fabs(g[i]) * (e + (W + 8) * U24)) * fabs(w[i] * h) / W;
        dw[i] += g[i] * h;
        bw[i] += (b[i] * (1 + e) + fabs(g[i]) * (e + (terms + 5) * U24)) * fabs(h);
    }
    for (int i = 0; i < W; i++) {
        const double h = clamp(x[i], clip) * r, gw = g[i] * w[i];
        g[i] = r * (gw - h * mean);
        b[i] = r * (b[i] * fabs(w[i]) + fabs(h) * (b_mean * (1 + e) + fabs(mean) * e) +
                    5 * U24 * (fabs(gw) + fabs(h) * (fabs(mean) + b_mean)));
    }
}

/* g: dy, replaced by dx; b: 0, replaced by the bound of dx. An x above the limit that BF16 may
 * round to the limit may count as not clamped. */
static void backward_reference(double *g, double *b, double *dw, double *bw, const double *x,
                               const float *stats, int N, Setting s)
{
    const Attention a = s.a;
    const int Q = a.H * a.D, K = a.K * a.D, width = Q + 2 * K, QW = Q / s.q_norms,
              KW = K / s.k_norms;
    for (int n = 0; n < N; n++, x += width, g += width, b += width) {
        const float *angles = s.angles + (size_t)(n % a.T) * (size_t)a.D;
        rotate(g, b, a.H, a.D, angles, -1);
        rotate(g + Q, b + Q, a.K, a.D, angles, -1);
        for (int i = 0, at = 0; s.qw && i < s.q_norms; i++, at += QW)
            norm_part_backward(g + at, b + at, dw, bw, x + at, s.qw, QW, N * s.q_norms, a.clip,
                               *stats++, s.v);
        for (int i = 0, at = Q; s.kw && i < s.k_norms; i++, at += KW)
            norm_part_backward(g + at, b + at, dw + QW, bw + QW, x + at, s.kw, KW, N * s.k_norms,
                               a.clip, *stats++, s.v);
        for (int i = 0; i < width; i++) {
            const bool beyond = a.clip > 0 && fabs(x[i]) > a.clip;
            const bool rounds = beyond && fabs(x[i]) <= a.clip * (1 + s.v);
            b[i] = beyond && !rounds ? 0
                                     : b[i] + s.v * (fabs(g[i]) + b[i]) + (rounds ? fabs(g[i]) : 0);
            g[i] = beyond ? 0 : g[i];
        }
    }
}

static void check_weights(const char *op, int N, const RopeCase *k, Tensor t, const double *ref,
                          const double *bound)
{
    check_close(name(op, N, k), t, ref, bound);
    golden_check(label, t, bound);
}

static void backward_case(const RopeCase *k, Tensor x, Tensor qw, Tensor kw, Setting s)
{
    const int N = x.rows, QW = s.a.H * s.a.D / s.q_norms, KW = s.a.K * s.a.D / s.k_norms,
              norms = s.q_norms + s.k_norms;
    const size_t n = tensor_numel(x), widths = (size_t)(QW + KW);
    Tensor dy = make_uneven(N, x.cols, 4, -1, 1), dx = make_operand(E5, N, x.cols),
           stats = make_f32(N, norms);
    Tensor dqw = k->norm ? make_filled(F, 1, QW, 5, -1, 1) : NONE;
    Tensor dkw = k->norm ? make_filled(F, 1, KW, 6, -1, 1) : NONE;
    double *ref = values(dy), *bound = doubles(n), *dw = doubles(widths), *bw = doubles(widths);
    const double *X = values(x), *old_q = values(dqw), *old_k = values(dkw);
    float *given = keep(tensor_numel(stats) * sizeof *given);
    for (int i = 0; i < N * norms; i++) {
        const int part = i % norms, of_k = part - s.q_norms,
                  at = of_k < 0 ? part * QW : s.q_norms * QW + of_k * KW;
        given[i] =
            (float)rstd_of(X + i / norms * x.cols + at, of_k < 0 ? QW : KW, k->clip, s.a.norm.eps);
    }
    put(stats, given);
    for (int i = 0; k->norm && i < QW + KW; i++) {
        dw[i] = i < QW ? old_q[i] : old_k[i - QW];
        bw[i] = (N + 4) * U24 * fabs(dw[i]);
    }
    Tensor dx_rows = make(E5, N, x.cols);
    const void *gradient = tensor_snapshot(dy);
    rope_backward(dx_rows, NONE, NONE, dy, x, k->norm ? stats.data : NULL, qw, kw, s.a);
    tensor_restore(dy, gradient);
    TWICE(rope_backward(dx, dqw, dkw, dy, x, k->norm ? stats.data : NULL, qw, kw, s.a), dx, dqw,
          dkw, dy);
    check_same_bytes("rope_backward without data_t", tensor_snapshot(dx_rows), tensor_snapshot(dx),
                     tensor_numel(dx));
    assert_true(operand_scale(dx_rows) == operand_scale(dx));
    backward_reference(ref, bound, dw, bw, X, given, N, s);
    check_operand(name("rope_backward", N, k), dx, ref, bound);
    check_transposed(label, dx);
    golden_operand(label, dx, ref, bound);
    if (k->norm) {
        check_weights("rope_dqnorm", N, k, dqw, dw, bw);
        check_weights("rope_dknorm", N, k, dkw, dw + QW, bw + QW);
    }
    EMPTY_IS_ZEROS(dqw, (tensor_restore(dy, gradient),
                         rope_backward(dx, dqw, dkw, dy, x, stats.data, qw, kw, s.a)));
    EMPTY_IS_ZEROS(dkw, (tensor_restore(dy, gradient),
                         rope_backward(dx, dqw, dkw, dy, x, stats.data, qw, kw, s.a)));
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
    Tensor qw =
        k->norm ? make_filled(H, 1, k->norm == BY_HEAD ? k->width : Q, 2, 0.5f, 1.5f) : NONE;
    Tensor kw =
        k->norm ? make_filled(H, 1, k->norm == BY_HEAD ? k->width : K, 3, 0.5f, 1.5f) : NONE;
    const float *angles = make_angles(T, k->width);
    const Attention a = { .B = 2,
                          .T = T,
                          .H = k->heads,
                          .K = k->kv_heads,
                          .D = k->width,
                          .clip = k->clip,
                          .norm = { RMS_NORM, 1e-5f },
                          .rope = table.data };
    const Setting s = setting_of(k, a, angles, qw, kw);
    put(table, angles);
    quantize(x, make_uneven(N, Q + 2 * K, 1, -2, 2));
    forward_case(k, x, qw, kw, s);
    backward_case(k, x, qw, kw, s);
    release();
}

TEST(test_rope)
{
    for (int k = 0; k < CASES; k++) {
        rope_case(16, &cases[k]);
        rope_case(96, &cases[k]);
        rope_case(160, &cases[k]);
    }
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
