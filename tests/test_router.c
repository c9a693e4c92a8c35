/* Compares the router of experts with its definition in double precision: choice, rows, statistics
 * and gradients. u = 2^-24. test_kernel_gradients compares the gradients with finite
 * differences. */
#include "tests/test.h"
#include "tests/golden.h"
#include "tests/routing.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };

typedef struct {
    const char *name;
    int N, E, k;
    Preference preference;
    int groups;
} Case;
static const Case cases[] = {
    { "one-token", 1, 4, 1, EVEN, 1 },          { "one-of-one", 5, 1, 1, EVEN, 5 },
    { "two-of-eight", 38, 8, 2, EVEN, 2 },      { "all", 129, 4, 4, EVEN, 3 },
    { "all-to-one", 300, 6, 1, ONE_EXPERT, 1 }, { "ties", 301, 7, 3, TIES, 7 },
    { "some-empty", 65, 9, 2, SOME_EMPTY, 5 },  { "many", 1000, 130, 8, EVEN, 4 },
};
enum { CASES = sizeof cases / sizeof cases[0] };

static char label[96];
static const char *name(const char *op, const Case *c, bool normalize, const char *variant)
{
    snprintf(label, sizeof label, "%s/%s%s%s", op, c->name, normalize ? "-normalized" : "",
             variant);
    return label;
}

static double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

static Tensor flat(void *p, size_t n)
{
    return (Tensor){ .data = p, .format = F, .rows = 1, .cols = (int)n };
}

/* Error of z of an F32 implementation: exp(x - max) has a relative error of 4 u + u |x - max|, and
 * z = max + log sum. p = exp(x - z) has twice this relative error, and 8 u. */
static double z_error(const double *x, double z, int E)
{
    double max = x[0], min = x[0];
    for (int e = 1; e < E; e++)
        max = fmax(max, x[e]), min = fmin(min, x[e]);
    return U24 * (E + 8 + (max - min) + 2 * (fabs(max) + fabs(z)));
}

static double p_error(const double *x, double z, int E)
{
    return 2 * z_error(x, z, E) + 8 * U24;
}

/* ---- route ----------------------------------------------------------------------------------- */

static void check_ints(const char *what, const int *device, const int *expected, size_t n)
{
    int *found = keep(n * sizeof *found);
    device_get(found, device, n * sizeof *found);
    for (size_t i = 0; i < n; i++)
        if (found[i] != expected[i])
            fail_msg("%s: %s[%zu] is %d, expected %d", label, what, i, found[i], expected[i]);
}

/* A normalized weight is a quotient of p and a sum of k p. */
static void route_case(const Case *c, bool normalize)
{
    const size_t n = (size_t)(c->N * c->k);
    Tensor logits = make_logits(c->N, c->E, c->preference);
    const Routed g = route_on_host(logits, c->k, normalize);
    const Routing r = make_routing(c->N, c->E, c->k);
    const Tensor weight = flat(r.weight, n);
    double *x = values(logits), *bound = doubles(n), *p = doubles((size_t)c->E);
    TWICE(route(r, logits, NULL, normalize), weight, flat(r.expert, n), flat(r.row, n),
          flat(r.assignment, (size_t)g.rows), flat(r.first, (size_t)c->E + 1));
    name("route", c, normalize, "");
    check_ints("expert", r.expert, g.host.expert, n);
    check_ints("first", r.first, g.host.first, (size_t)c->E + 1);
    check_ints("row", r.row, g.host.row, n);
    check_ints("assignment", r.assignment, g.host.assignment, (size_t)g.rows);
    for (size_t i = 0; i < n; i++) {
        const double *row = x + i / (size_t)c->k * (size_t)c->E;
        bound[i] =
            g.weight[i] * (2 * p_error(row, softmax_of(p, row, c->E), c->E) + (c->k + 2) * U24);
    }
    check_close(label, weight, g.weight, bound);
    golden_check(label, weight, bound);
    release();
}

TEST(test_route)
{
    for (int i = 0; i < CASES; i++)
        for (int normalize = 0; normalize < 2; normalize++)
            route_case(&cases[i], normalize);
}

/* A bias changes the choice, not the weights: score = p + bias of a chosen expert is at least that
 * of the next, and of all that are not chosen, up to the errors of p and of a sum. Experts with
 * equal logits and equal bias are chosen in their order. */
static void bias_case(const Case *c)
{
    const int E = c->E, k = c->k;
    const size_t n = (size_t)(c->N * k);
    Tensor logits = make_logits(c->N, E, c->preference), bias = make_f32(1, E);
    const Routing r = make_routing(c->N, E, k);
    const Tensor weight = flat(r.weight, n);
    double *x = values(logits), *p = doubles((size_t)E), *ref = doubles(n), *bound = doubles(n);
    float *b = keep((size_t)E * sizeof *b);
    int *expert = keep(n * sizeof *expert);
    for (int e = 0; e < E; e++)
        b[e] = (float)(e % 3 - 1) / 16;
    put(bias, b);
    TWICE(route(r, logits, bias.data, false), weight, flat(r.expert, n), flat(r.row, n));
    device_get(expert, r.expert, n * sizeof *expert);
    name("route", c, false, "-bias");
    for (int i = 0; i < c->N; i++) {
        const double *row = x + i * E, z = softmax_of(p, row, E),
                     error = 2 * (p_error(row, z, E) + 2 * U24);
        for (int j = 0; j < k; j++) {
            const int own = expert[i * k + j];
            ref[i * k + j] = p[own];
            bound[i * k + j] = p[own] * 2 * p_error(row, z, E);
            for (int e = 0; e < E; e++) {
                int place = 0;
                while (place < k && expert[i * k + place] != e)
                    place++;
                const double lead = p[own] + (double)b[own] - p[e] - (double)b[e];
                const bool equal = row[own] == row[e] && b[own] == b[e];
                if (place > j && (equal ? own > e : lead < -error))
                    fail_msg("%s: token %d: expert %d is before expert %d", label, i, own, e);
            }
        }
    }
    check_close(label, weight, ref, bound);
    release();
}

TEST(test_bias)
{
    for (int i = 0; i < CASES; i++)
        bias_case(&cases[i]);
}

/* Whatever the logits are, each token has k different experts, and each assignment has its own row
 * among the rows of its expert. Otherwise a diverged run would write outside of its memory. */
TEST(test_not_finite)
{
    enum { N = 150, E = 6, K = 4 };
    Tensor logits = make_logits(N, E, EVEN);
    float *x = keep(tensor_numel(logits) * sizeof *x);
    device_get(x, logits.data, tensor_bytes(logits));
    for (int i = 0; i < N * E; i++)
        if (random_bits(1, (uint64_t)i) % 3 == 0 || i / E % 5 == 0)
            x[i] = (float[]){ NAN, INFINITY, -INFINITY }[i / E % 3];
    put(logits, x);
    const Routing r = make_routing(N, E, K);
    int expert[N * K], row[N * K], first[E + 1],
        *assignment = keep((size_t)routing_rows(N, E, K) * sizeof *assignment);
    route(r, logits, NULL, true);
    device_get(expert, r.expert, sizeof expert);
    device_get(row, r.row, sizeof row);
    device_get(first, r.first, sizeof first);
    device_get(assignment, r.assignment, (size_t)routing_rows(N, E, K) * sizeof *assignment);
    assert_true(first[0] == 0 && first[E] <= routing_rows(N, E, K));
    for (int i = 0; i < N * K; i++) {
        assert_in_range(expert[i], 0, E - 1);
        for (int j = i / K * K; j < i; j++)
            assert_int_not_equal(expert[i], expert[j]);
        assert_in_range(row[i], first[expert[i]], first[expert[i] + 1] - 1);
        assert_int_equal(assignment[row[i]], i);
    }
    release();
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* Sums of `tokens` terms, in any order, have an error of tokens u of the sum of their sizes. -log p
 * = z - x has the absolute error of z, and 2 u (|z| + |x|). */
static void stats_case(const Case *c)
{
    const int E = c->E, width = router_stats_width(E), tokens = c->N / c->groups;
    Tensor logits = make_logits(c->N, E, c->preference), stats = make_f32(c->groups, width);
    const Routed g = route_on_host(logits, c->k, false);
    double *x = values(logits), *p = doubles((size_t)E), *ref = doubles(tensor_numel(stats)),
           *bound = doubles(tensor_numel(stats));
    for (int i = 0; i < c->N * c->k; i++)
        ref[i / c->k / tokens * width + g.host.expert[i]]++;
    for (int n = 0; n < c->N; n++) {
        double *sum = ref + n / tokens * width, *error = bound + n / tokens * width,
               z = softmax_of(p, x + n * E, E), bz = z_error(x + n * E, z, E),
               bp = p_error(x + n * E, z, E) + tokens * U24;
        for (int e = 0; e < E; e++) {
            const double surprise = z - x[n * E + e];
            sum[E + e] += p[e];
            error[E + e] += p[e] * bp;
            sum[2 * E + 1] += p[e] * surprise;
            error[2 * E + 1] += p[e] * (surprise * (bp + (E + 2) * U24) + bz +
                                        2 * U24 * (fabs(z) + fabs(x[n * E + e])));
        }
        sum[2 * E] += z * z;
        error[2 * E] += 2 * fabs(z) * bz + bz * bz + (tokens + 4) * U24 * z * z;
    }
    TWICE(router_stats(stats, logits, g.device), stats);
    check_close(name("router_stats", c, false, ""), stats, ref, bound);
    golden_check(label, stats, bound);
    const double *found = values(stats);
    for (int i = 0; i < c->groups * E; i++)
        assert_true(found[i / E * width + i % E] == ref[i / E * width + i % E]);
    release();
}

TEST(test_stats)
{
    for (int i = 0; i < CASES; i++)
        stats_case(&cases[i]);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* The gradient with respect to p of one token: from the weights, each of which depends on p, and
 * from the balance loss. size: the sum of the absolute values of its terms. */
static void probability_gradient(double *dp, double *size, const double *p, const Routed *g, int n,
                                 const double *dweight, bool normalize, const double *count,
                                 double balance)
{
    const int E = g->host.experts, k = g->host.top_k;
    double sum = 0;
    for (int e = 0; e < E; e++) {
        dp[e] = count ? balance * count[e] : 0;
        size[e] = fabs(dp[e]);
    }
    for (int i = n * k; i < (n + 1) * k; i++)
        sum += p[g->host.expert[i]];
    for (int i = n * k; i < (n + 1) * k; i++) {
        const double d = dweight[g->host.row[i]];
        const int e = g->host.expert[i];
        dp[e] += normalize ? d / sum : d;
        size[e] += fabs(normalize ? d / sum : d);
        for (int j = n * k; normalize && j < (n + 1) * k; j++) { /* weight i depends on each p */
            dp[g->host.expert[j]] -= d * p[e] / (sum * sum);
            size[g->host.expert[j]] += fabs(d) * p[e] / (sum * sum);
        }
    }
}

typedef struct {
    bool normalize;
    float balance, z;
    Format format;
    const char *text;
} Losses;
static const Losses losses[] = {
    { false, 0, 0, { F32, 0 }, "-weights" },        { true, 0, 0, { F32, 0 }, "-weights" },
    { false, 0.01f, 0.25f, { F32, 0 }, "-losses" }, { true, 0.01f, 0.25f, { F32, 0 }, "-losses" },
    { true, 0.01f, 0.25f, { BF16, 0 }, "-bf16" },
};

/* dx[e] = p[e] (dp[e] - sum p dp) + 2 z weight z p[e]. Each of its terms has at most four factors
 * with the error of p, and sums of E and of k terms. */
static void reference(double *ref, double *bound, const double *x, const Routed *g,
                      const double *dweight, const double *counts, int groups, const Losses *l)
{
    const int N = g->host.tokens, E = g->host.experts;
    double *p = doubles((size_t)E), *dp = doubles((size_t)E), *size = doubles((size_t)E);
    for (int n = 0; n < N; n++) {
        const double z = softmax_of(p, x + n * E, E), bz = z_error(x + n * E, z, E),
                     relative =
                         4 * p_error(x + n * E, z, E) + (2 * E + 2 * g->host.top_k + 12) * U24;
        double mean = 0, mean_size = 0;
        probability_gradient(dp, size, p, g, n, dweight, l->normalize,
                             counts ? counts + n / (N / groups) * router_stats_width(E) : NULL,
                             l->balance);
        for (int e = 0; e < E; e++)
            mean += p[e] * dp[e], mean_size += p[e] * size[e];
        for (int e = 0; e < E; e++) {
            ref[n * E + e] = p[e] * (dp[e] - mean) + 2 * l->z * z * p[e];
            bound[n * E + e] =
                relative * p[e] * (size[e] + mean_size + 2 * l->z * fabs(z)) + 2 * l->z * bz * p[e];
        }
    }
}

/* dweight of padding rows, and columns of counts beyond E, are NaN: no result may depend on
 * them. */
static void backward_case(const Case *c, const Losses *l)
{
    const int E = c->E, width = router_stats_width(E);
    Tensor logits = make_logits(c->N, E, c->preference), dlogits = make(l->format, c->N, E);
    const Routed g = route_on_host(logits, c->k, l->normalize);
    Tensor dweight = make_f32(1, g.rows), counts = make_f32(c->groups, width);
    float *d = keep(tensor_numel(dweight) * sizeof *d),
          *count = keep(tensor_numel(counts) * sizeof *count);
    for (int row = 0; row < g.rows; row++)
        d[row] = g.host.assignment[row] < 0 ? NAN : uniform(2, (size_t)row, -1, 1);
    for (int i = 0; i < c->groups * width; i++)
        count[i] = i % width < E ? (float)(random_bits(3, (uint64_t)i) % 50) : NAN;
    put(dweight, d);
    put(counts, count);
    const Tensor given = l->balance != 0 ? counts : NONE;
    double *ref = doubles(tensor_numel(logits)), *bound = doubles(tensor_numel(logits));
    reference(ref, bound, values(logits), &g, values(dweight), values(given), c->groups, l);
    TWICE(route_backward(dlogits, dweight.data, logits, g.device, l->normalize, given, l->balance,
                         l->z),
          dlogits);
    check_close(name("route_backward", c, l->normalize, l->text), dlogits, ref, bound);
    golden_check(label, dlogits, bound);
    release();
}

TEST(test_backward)
{
    for (int i = 0; i < CASES; i++)
        for (size_t j = 0; j < sizeof losses / sizeof losses[0]; j++)
            backward_case(&cases[i], &losses[j]);
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(test_errors)
{
    Tensor logits = make_logits(6, 4, EVEN), half = make(H, 6, 4), stats = make_f32(4, 10);
    Routing r = make_routing(6, 4, 2), more = make_routing(6, 4, 2);
    Tensor dweight = make_f32(1, routing_rows(6, 4, 2));
    more.top_k = 5;
    DIES("route: 6 tokens, each with 5 of 4 experts", route(more, logits, NULL, false));
    DIES("route: logits is bf16; expected f32", route(r, half, NULL, false));
    DIES("router_stats: 6 tokens in 4 groups", router_stats(stats, logits, r));
    DIES("route_backward: the balance loss needs counts",
         route_backward(half, dweight.data, logits, r, false, NONE, 1, 0));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
