/* The rotation of heads in double, and bounds of the errors of F32 implementations. u = 2^-24. */
#pragma once
#include "tests/kit.h"

static inline double clamp(double x, double limit)
{
    return limit > 0 ? fmin(fmax(x, -limit), limit) : x;
}

/* Rotates heads by sign * angle. b: error bounds of the values before the rotation on entry, and
 * after the rotation on return. Two products and a sum are rounded. */
static inline void rotate(double *x, double *b, int heads, int D, const float *angles, double sign)
{
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < D / 2; i++) {
            const int p = h * D + i, q = p + D / 2;
            const double c = angles[2 * i], s = sign * angles[2 * i + 1], xp = x[p], xq = x[q],
                         bp = b[p], bq = b[q];
            x[p] = xp * c - xq * s;
            x[q] = xp * s + xq * c;
            b[p] = fabs(c) * bp + fabs(s) * bq + 3 * U24 * (fabs(xp * c) + fabs(xq * s));
            b[q] = fabs(s) * bp + fabs(c) * bq + 3 * U24 * (fabs(xp * s) + fabs(xq * c));
        }
}
