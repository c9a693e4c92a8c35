/* Routings of tokens to experts, made on the host from their definition in kernels/experts.h, with
 * copies in device memory. Tests of the operations of experts get these, so that they do not depend
 * on `route`. */
#pragma once
#include "kernels/experts.h"
#include "tests/kit.h"

/* The logits of tokens: uniform; whole numbers, so that many are equal; larger for the last expert;
 * smaller for each third expert. */
typedef enum { EVEN, TIES, ONE_EXPERT, SOME_EMPTY } Preference;

typedef struct {
    Routing device, host; /* host.weight: rounded to F32 */
    double *weight;       /* (N,k) */
    int *count;           /* (E) rows of each expert, without padding */
    int rows, used;       /* R and first[E] */
} Routed;

static inline Tensor make_logits(int N, int E, Preference preference)
{
    Tensor t = make_filled((Format){ F32, 0 }, N, E, 31, -2, 2);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (int i = 0; i < N * E; i++) {
        x[i] = uniform(31, (size_t)i, -2, 2);
        if (preference == TIES)
            x[i] = rintf(x[i]);
        if (preference == ONE_EXPERT && i % E == E - 1)
            x[i] += 20;
        if (preference == SOME_EMPTY && i % E % 3 == 1)
            x[i] -= 20;
    }
    put(t, x);
    return t;
}

/* Returns how many experts the token prefers to expert e. */
static inline int place_of(const double *x, int E, int e)
{
    int before = 0;
    for (int i = 0; i < E; i++)
        before += x[i] > x[e] || (x[i] == x[e] && i < e);
    return before;
}

/* Computes the probabilities p, and log sum exp of the E logits x. */
static inline double softmax_of(double *p, const double *x, int E)
{
    double sum = 0;
    for (int e = 0; e < E; e++)
        sum += exp(x[e]);
    for (int e = 0; e < E; e++)
        p[e] = exp(x[e]) / sum;
    return log(sum);
}

static inline void choose_experts(Routed *g, int n, const double *x, bool normalize)
{
    const int E = g->host.experts, k = g->host.top_k;
    double *p = keep((size_t)E * sizeof *p), sum = 0;
    softmax_of(p, x, E);
    for (int e = 0; e < E; e++) {
        const int j = place_of(x, E, e);
        if (j >= k)
            continue;
        g->host.expert[n * k + j] = e;
        g->weight[n * k + j] = p[e];
        g->count[e]++;
        sum += p[e];
    }
    for (int i = n * k; i < (n + 1) * k; i++) {
        if (normalize)
            g->weight[i] /= sum;
        g->host.weight[i] = (float)g->weight[i];
    }
}

static inline void place_assignments(Routed *g)
{
    Routing r = g->host;
    int *next = keep((size_t)r.experts * sizeof *next);
    for (int e = 0; e < r.experts; e++) {
        next[e] = r.first[e];
        r.first[e + 1] = r.first[e];
        while (r.first[e + 1] - r.first[e] < g->count[e])
            r.first[e + 1] += EXPERT_ROWS;
    }
    for (int row = 0; row < g->rows; row++)
        r.assignment[row] = -1;
    for (int i = 0; i < r.tokens * r.top_k; i++) {
        r.row[i] = next[r.expert[i]]++;
        r.assignment[r.row[i]] = i;
    }
    g->used = r.first[r.experts];
}

static inline Routing make_routing(int N, int E, int k)
{
    const size_t n = (size_t)(N * k) * sizeof(int);
    return (Routing){ .tokens = N,
                      .experts = E,
                      .top_k = k,
                      .expert = guarded(n),
                      .weight = guarded(n),
                      .row = guarded(n),
                      .assignment = guarded((size_t)routing_rows(N, E, k) * sizeof(int)),
                      .first = guarded((size_t)(E + 1) * sizeof(int)) };
}

static inline Routed route_on_host(Tensor logits, int k, bool normalize)
{
    const int N = logits.rows, E = logits.cols;
    const size_t n = (size_t)(N * k), R = (size_t)routing_rows(N, E, k);
    Routed g = { .device = make_routing(N, E, k),
                 .weight = keep(n * sizeof(double)),
                 .count = keep((size_t)E * sizeof(int)),
                 .rows = (int)R };
    g.host = g.device;
    g.host.expert = keep(n * sizeof(int)), g.host.row = keep(n * sizeof(int));
    g.host.weight = keep(n * sizeof(float)), g.host.assignment = keep(R * sizeof(int));
    g.host.first = keep((size_t)(E + 1) * sizeof(int));
    const double *x = values(logits);
    for (int i = 0; i < N; i++)
        choose_experts(&g, i, x + i * E, normalize);
    place_assignments(&g);
    device_put(g.device.expert, g.host.expert, n * sizeof(int));
    device_put(g.device.weight, g.host.weight, n * sizeof(float));
    device_put(g.device.row, g.host.row, n * sizeof(int));
    device_put(g.device.assignment, g.host.assignment, R * sizeof(int));
    device_put(g.device.first, g.host.first, (size_t)(E + 1) * sizeof(int));
    return g;
}
