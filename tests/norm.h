/* Norms in double, and bounds of the errors of F32 implementations. u = 2^-24. */
#pragma once
#include "tests/kit.h"

/* Mean and rstd of a row, and bounds of their errors in F32. A sum of C terms has an error of C u
 * times the sum of the absolute terms. The variance is a mean of squared differences, each
 * difference with an error of u (|x|+|m|), and has a relative error of (C + 8) u. rstd has half of
 * this relative error, plus the errors of a root and a quotient. */
typedef struct {
    double mean, rstd, mean_error, rstd_error;
} Stats;

static inline Stats row_stats(const double *x, int C, Norm norm)
{
    Stats s = { 0 };
    double variance = 0, size = 0, mean_abs = 0;
    for (int c = 0; c < C; c++) {
        s.mean += norm.kind == LAYER_NORM ? x[c] / C : 0;
        mean_abs += fabs(x[c]) / C;
    }
    for (int c = 0; c < C; c++) {
        variance += (x[c] - s.mean) * (x[c] - s.mean) / C;
        size += fabs(x[c] - s.mean) * (fabs(x[c]) + fabs(s.mean)) / C;
    }
    s.rstd = 1 / sqrt(variance + norm.eps);
    s.mean_error = norm.kind == LAYER_NORM ? (C + 2) * U24 * mean_abs : 0;
    s.rstd_error = s.rstd * ((C + 8) * U24 / 2 + 6 * U24) + pow(s.rstd, 3) * size * 2 * U24;
    return s;
}

/* Computes y = (x - m) r w + residual, and the error of y from the errors of m and r and from five
 * roundings. */
static inline void norm_reference(double *y, double *by, double *stats, double *bs, const double *x,
                                  const double *w, const double *add, int N, int C, Norm norm)
{
    for (int n = 0; n < N; n++) {
        const Stats s = row_stats(x + n * C, C, norm);
        stats[2 * n] = s.mean, stats[2 * n + 1] = s.rstd;
        bs[2 * n] = s.mean_error, bs[2 * n + 1] = s.rstd_error;
        for (int i = n * C; i < (n + 1) * C; i++) {
            double d = x[i] - s.mean, wc = w ? w[i % C] : 1, r = add ? add[i] : 0,
                   h = d * s.rstd * wc;
            y[i] = h + r;
            by[i] = fabs(d * wc) * s.rstd_error +
                    fabs(wc) * s.rstd * (s.mean_error + U24 * fabs(d)) +
                    5 * U24 * (fabs(h) + fabs(r));
        }
    }
}

/* With h = (x-m) r in F32: |error of h| <= 3 u |h| + u r (|x|+|m|) =: e. A mean of C terms has an
 * error of (C + 8) u times the mean of the absolute terms, plus the error e of their factors. A sum
 * over N rows has an error of N u times the sum of the absolute terms. stats: mean and rstd. old:
 * the values to which dx is added; NULL: dx is not added. */
static inline void norm_backward_row(double *dx, double *bx, double *dw, double *bw,
                                     const double *dy, const double *x, const double *stats,
                                     const double *w, const double *old, int N, int C,
                                     NormKind kind)
{
    double mean = stats[0], r = stats[1], mg = 0, mgh = 0, ag = 0, agh = 0, age = 0;
    for (int c = 0; c < C; c++) {
        double g = dy[c] * (w ? w[c] : 1), h = (x[c] - mean) * r;
        double e = 3 * U24 * fabs(h) + U24 * r * (fabs(x[c]) + fabs(mean));
        mg += g / C, mgh += g * h / C, ag += fabs(g) / C, agh += fabs(g * h) / C,
            age += fabs(g) * e / C;
        dw[c] += dy[c] * h;
        bw[c] += fabs(dy[c]) * e + fabs(dy[c] * h) * (N + 5) * U24;
    }
    for (int c = 0; c < C; c++) {
        double g = dy[c] * (w ? w[c] : 1), h = (x[c] - mean) * r, before = old ? old[c] : 0;
        double e = 3 * U24 * fabs(h) + U24 * r * (fabs(x[c]) + fabs(mean)),
               m = kind == LAYER_NORM ? mg : 0;
        dx[c] = r * (g - m - h * mgh) + before;
        bx[c] = r * (6 * U24 * (fabs(g) + fabs(h * mgh)) + (m != 0 ? (C + 8) * U24 * ag : 0) +
                     fabs(h) * ((C + 8) * U24 * agh + age) + e * agh) +
                2 * U24 * fabs(before);
    }
}
