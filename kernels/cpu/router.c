/* The router of an MLP of experts. With p = softmax(x) of a row of logits x, and z = log sum exp x:
 *
 *     dp[i]/dx[e] = p[i] ([i = e] - p[e])        dz/dx[e] = p[e]
 *
 * The weights of a token's experts are p of these experts. If they are normalized, they are the
 * softmax of only these logits. */
#include <math.h>

#include "kernels/cpu/cpu.h"

/* Sets p = softmax(x), in F64, and returns z. */
static double softmax(double *p, const float *x, int experts)
{
    double max = x[0], sum = 0;
    for (int e = 1; e < experts; e++)
        max = fmax(max, x[e]);
    for (int e = 0; e < experts; e++)
        sum += p[e] = exp(x[e] - max);
    for (int e = 0; e < experts; e++)
        p[e] /= sum;
    return max + log(sum);
}

static double *probabilities(int experts)
{
    return (double *)cpu_scratch(0, 2 * (size_t)experts);
}

/* ---- choice ---------------------------------------------------------------------------------- */

static bool is_chosen(const int *expert, int chosen, int e)
{
    for (int j = 0; j < chosen; j++)
        if (expert[j] == e)
            return true;
    return false;
}

/* Sets `expert` to the top_k experts with the largest x. NOTE: these are different experts
 * even if logits are NaN. */
static void choose(int *expert, const float *x, int top_k, int experts)
{
    for (int j = 0; j < top_k; j++) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (!is_chosen(expert, j, e) && (best < 0 || x[e] > x[best]))
                best = e;
        expert[j] = best;
    }
}

/* Returns the divisor of the weights: the sum of p over a token's experts, or 1 if weights are not
 * normalized. */
static double divisor(const double *p, const int *expert, int top_k, bool normalize)
{
    double sum = 0;
    for (int j = 0; j < top_k; j++)
        sum += p[expert[j]];
    return normalize ? sum : 1;
}

/* Computes the arrays row, assignment and first of r from its array expert. */
static void place(Routing r)
{
    const int assignments = r.tokens * r.top_k, rows = routing_rows(r.tokens, r.experts, r.top_k);
    for (int i = 0; i < rows; i++)
        r.assignment[i] = -1;
    r.first[0] = 0;
    for (int e = 0; e < r.experts; e++) {
        int row = r.first[e];
        for (int i = 0; i < assignments; i++)
            if (r.expert[i] == e) {
                r.row[i] = row;
                r.assignment[row++] = i;
            }
        r.first[e + 1] = (row + EXPERT_ROWS - 1) / EXPERT_ROWS * EXPERT_ROWS;
    }
}

void backend_route(Routing r, Tensor logits, const float *bias, bool normalize)
{
    check_route(r, logits);
    double *p = probabilities(r.experts);
    float *score = cpu_scratch(1, (size_t)r.experts);
    for (int n = 0; n < r.tokens; n++) {
        const float *x = (const float *)logits.data + (size_t)n * (size_t)r.experts;
        int *expert = r.expert + (size_t)n * (size_t)r.top_k;
        softmax(p, x, r.experts);
        for (int e = 0; e < r.experts && bias; e++)
            score[e] = (float)p[e] + bias[e];
        choose(expert, bias ? score : x, r.top_k, r.experts);
        const double sum = divisor(p, expert, r.top_k, normalize);
        for (int j = 0; j < r.top_k; j++)
            r.weight[n * r.top_k + j] = (float)(p[expert[j]] / sum);
    }
    place(r);
}

/* ---- statistics and losses ------------------------------------------------------------------- */

void backend_router_stats(Tensor stats, Tensor logits, Routing r)
{
    check_router_stats(stats, logits, r);
    const int E = r.experts, width = router_stats_width(E), group = r.tokens / stats.rows;
    double *p = probabilities(E), *sum = (double *)cpu_scratch(1, 2 * (size_t)width);
    for (int g = 0; g < stats.rows; g++) {
        for (int i = 0; i < width; i++)
            sum[i] = 0;
        for (int n = g * group; n < (g + 1) * group; n++) {
            const float *x = (const float *)logits.data + (size_t)n * (size_t)E;
            const double z = softmax(p, x, E);
            for (int j = 0; j < r.top_k; j++)
                sum[r.expert[n * r.top_k + j]]++;
            for (int e = 0; e < E; e++) {
                sum[E + e] += p[e];
                sum[2 * E + 1] -= p[e] > 0 ? p[e] * (x[e] - z) : 0;
            }
            sum[2 * E] += z * z;
        }
        for (int i = 0; i < width; i++)
            ((float *)stats.data)[g * width + i] = (float)sum[i];
    }
}

/* Adds to dx the gradient through the weights of a token, from the gradients dweight of its
 * assignments. */
static void add_weights(double *dx, const double *p, const int *expert, const int *row,
                        const float *dweight, Routing r, bool normalize)
{
    const double sum = divisor(p, expert, r.top_k, normalize);
    double mean = 0;
    for (int j = 0; j < r.top_k; j++) {
        const double weight = p[expert[j]] / sum;
        dx[expert[j]] += weight * dweight[row[j]];
        mean += weight * dweight[row[j]];
    }
    if (!normalize)
        for (int e = 0; e < r.experts; e++)
            dx[e] -= p[e] * mean;
    else
        for (int j = 0; j < r.top_k; j++)
            dx[expert[j]] -= p[expert[j]] / sum * mean;
}

/* Adds to dx the gradient of scale times the sum over e of count[e] p[e]. */
static void add_balance(double *dx, const double *p, const float *count, int experts, double scale)
{
    double mean = 0;
    for (int e = 0; e < experts; e++)
        mean += p[e] * count[e];
    for (int e = 0; e < experts; e++)
        dx[e] += scale * p[e] * (count[e] - mean);
}

void backend_route_backward(Tensor dlogits, const float *dweight, Tensor logits, Routing r,
                            bool normalize, Tensor counts, float balance, float z)
{
    check_route_backward(dlogits, dweight, logits, r, counts, balance);
    const int E = r.experts;
    const float *count = tensor_values(counts, 2);
    double *p = probabilities(E), *dx = (double *)cpu_scratch(1, 2 * (size_t)E);
    float *output = tensor_result(dlogits, 3);
    for (int n = 0; n < r.tokens; n++) {
        const double lse = softmax(p, (const float *)logits.data + (size_t)n * (size_t)E, E);
        for (int e = 0; e < E; e++)
            dx[e] = 2 * z * lse * p[e];
        add_weights(dx, p, r.expert + n * r.top_k, r.row + n * r.top_k, dweight, r, normalize);
        if (balance != 0)
            add_balance(dx, p, count + n / (r.tokens / counts.rows) * counts.cols, E, balance);
        for (int e = 0; e < E; e++)
            output[(size_t)n * (size_t)E + (size_t)e] = (float)dx[e];
    }
    tensor_finish(dlogits, output);
}

void backend_router_sum(Tensor sums, Tensor stats, int experts, float factor)
{
    check_router_sum(sums, stats, experts);
    const int E = experts, width = router_stats_width(E);
    const float *from = stats.data;
    float *to = sums.data;
    double product = 0;
    for (int i = 0; i < width; i++) {
        double sum = 0;
        for (int g = 0; g < stats.rows; g++)
            sum += (double)from[g * width + i];
        to[i] = (float)(to[i] + sum);
    }
    for (int g = 0; g < stats.rows; g++)
        for (int e = 0; e < E; e++)
            product += (double)from[g * width + e] * (double)from[g * width + E + e];
    to[width] = (float)(to[width] + factor * product);
}
