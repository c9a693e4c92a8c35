/* The router's losses of a model, in double precision, from the logits of its last forward pass. */
#pragma once
#include <math.h>
#include <stdlib.h>

#include "kernels/runtime/device.h"
#include "model/model.h"

/* Finds the k largest of E logits; of equal logits, the first ones. */
static inline void largest_logits(int *chosen, const float *x, int E, int k)
{
    for (int j = 0; j < k; j++) {
        chosen[j] = -1;
        for (int e = 0; e < E; e++) {
            int taken = 0;
            for (int i = 0; i < j; i++)
                taken |= chosen[i] == e;
            if (!taken && (chosen[j] < 0 || x[e] > x[chosen[j]]))
                chosen[j] = e;
        }
    }
}

/* For tokens [first, end) of block l, adds the counts, the sums of the probabilities, and the sum
 * of z^2. */
static inline void add_router_stats(const Model *m, int l, int first, int end, double *count,
                                    double *p, double *squares)
{
    const Experts *e = &m->text.config->experts;
    const Tensor t = m->acts[l].router_logits;
    float *x = malloc(tensor_bytes(t));
    device_get(x, t.data, tensor_bytes(t));
    for (int n = first; n < end; n++) {
        const float *row = x + (size_t)n * (size_t)e->count;
        double sum = 0;
        int chosen[64];
        for (int i = 0; i < e->count; i++)
            sum += exp((double)row[i]);
        for (int i = 0; i < e->count; i++)
            p[i] += exp((double)row[i]) / sum;
        largest_logits(chosen, row, e->count, e->top_k);
        for (int j = 0; j < e->top_k; j++)
            count[chosen[j]]++;
        *squares += log(sum) * log(sum);
    }
    free(x);
}

/* Returns the smallest gap between the logit of a token's last chosen expert and the logit of the
 * best expert that is not chosen; infinite if all experts are chosen. */
static inline float router_gap(const Model *m)
{
    const Experts *e = &m->text.config->experts;
    float gap = INFINITY;
    for (int l = 0; l < m->text.L && e->count > e->top_k; l++) {
        const Tensor t = m->acts[l].router_logits;
        float *x = malloc(tensor_bytes(t));
        device_get(x, t.data, tensor_bytes(t));
        for (int n = 0; n < t.rows; n++) {
            int best[64];
            const float *row = x + (size_t)n * (size_t)e->count;
            largest_logits(best, row, e->count, e->top_k + 1);
            gap = fminf(gap, row[best[e->top_k - 1]] - row[best[e->top_k]]);
        }
        free(x);
    }
    return gap;
}

static inline double balance_of(const double *count, const double *p, int E, double tokens)
{
    double sum = 0;
    for (int e = 0; e < E; e++)
        sum += count[e] / tokens * (p[e] / tokens);
    return E * sum;
}

/* Load-balancing loss and z-loss of a batch of one micro-batch, with their factors. */
static inline double router_loss(const Model *m)
{
    const Experts *e = &m->text.config->experts;
    const int L = m->text.L, N = m->text.N,
              groups = e->balance == BALANCE_SEQUENCE ? m->text.attn.B : 1, size = N / groups;
    double balance = 0, squares = 0, all_count[64] = { 0 }, all_p[64] = { 0 };
    for (int l = 0; l < L && e->count > 0; l++)
        for (int g = 0; g < groups; g++) {
            double count[64] = { 0 }, p[64] = { 0 };
            add_router_stats(m, l, g * size, (g + 1) * size, count, p, &squares);
            balance += balance_of(count, p, e->count, size) / (groups * L * e->top_k);
            for (int i = 0; i < e->count; i++)
                all_count[i] += count[i], all_p[i] += p[i];
        }
    if (e->balance == BALANCE_POOLED)
        balance = balance_of(all_count, all_p, e->count, (double)N * L);
    if (e->balance == BALANCE_NONE)
        balance = 0;
    return e->count == 0 ? 0 : e->balance_coef * balance + e->z_coef * squares / ((double)N * L);
}
