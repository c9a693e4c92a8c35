/* Cross entropy, z-loss and gradient in double, with error bounds of an F32 implementation. */
#pragma once
#include "tests/kit.h"

typedef struct {
    double *loss, *zloss, *grad, *loss_bound, *zloss_bound, *grad_bound;
} Loss;

/* exp(x - max) has a relative error of 4 u + u |x - max|, so z = max + log sum has an error of e =
 * u (vocab + 8 + range + 2 (|max| + |z|)), and p = exp(x) / sum has a relative error of 2 e + 8
 * u. With a temperature, x = logit / temperature has a relative error of `r` = 3 u, of the inverse,
 * the product and, in base 2, the product with log2(e). */
static inline void loss_row(Loss *l, int n, const double *logits, int target, int vocab, int V,
                            double temperature, double scale, double weight)
{
    const double r = temperature == 1 ? 0 : 3 * U24;
    double max = -INFINITY, min = INFINITY, total = 0;
    if (target < 0)
        return; /* all results are exactly 0 */
    double *x = keep(sizeof *x * (size_t)vocab);
    for (int j = 0; j < vocab; j++)
        x[j] = logits[j] / temperature;
    for (int j = 0; j < vocab; j++)
        max = fmax(max, x[j]), min = fmin(min, x[j]);
    for (int j = 0; j < vocab; j++)
        total += exp(x[j] - max);
    double z = max + log(total), e = U24 * (vocab + 8 + (max - min) + 2 * (fabs(max) + fabs(z))) +
                                     2 * r * fmax(fabs(max), fabs(min));
    scale /= temperature;
    l->loss[n] = z - x[target];
    l->zloss[n] = z * z;
    l->loss_bound[n] = e + 2 * U24 * (fabs(z) + fabs(x[target])) + r * fabs(x[target]);
    l->zloss_bound[n] = 2 * fabs(z) * e + e * e + 4 * U24 * z * z;
    for (int j = 0; j < vocab; j++) {
        double p = exp(x[j] - z), factor = 1 + 2 * weight * fabs(z);
        l->grad[n * V + j] = scale * ((1 + 2 * weight * z) * p - (j == target));
        l->grad_bound[n * V + j] = scale * (factor * p * (2 * e + 12 * U24) + 2 * weight * e * p +
                                            (4 * U24 + r) * (j == target));
    }
}

static inline Loss loss_reference(const double *logits, const int *target, int N, int vocab, int V,
                                  double temperature, double scale, double weight)
{
    const size_t rows = sizeof(double) * (size_t)N, all = rows * (size_t)V;
    Loss l = { .loss = keep(rows),
               .zloss = keep(rows),
               .grad = keep(all),
               .loss_bound = keep(rows),
               .zloss_bound = keep(rows),
               .grad_bound = keep(all) };
    for (int i = 0; i < N; i++)
        loss_row(&l, i, logits + (size_t)i * (size_t)V, target[i], vocab, V, temperature, scale,
                 weight);
    return l;
}
