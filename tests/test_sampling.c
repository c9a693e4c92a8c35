/* Sampling: the distribution, the nucleus, and the inputs of a draw. */
#include <math.h>
#include <stddef.h>

#include "model/sampling.h"
#include "tests/test.h"

enum { V = 5, DRAWS = 40000 };

static const float logits[V] = { 1, 3, -2, 3, 0.5f };

static void count_draws(int *count, double temperature, double top_p)
{
    const Sampling s = { temperature, top_p, 7 };
    for (int v = 0; v < V; v++)
        count[v] = 0;
    for (uint64_t i = 0; i < DRAWS; i++)
        count[sample_token(logits, V, &s, i)]++;
}

/* `nucleus`: one bit for each token that can be drawn. A count is binomial: of 10^6 correct counts,
 * 2 differ by more than five standard deviations. */
static void check_distribution(double temperature, double top_p, unsigned nucleus)
{
    int count[V];
    double total = 0;
    count_draws(count, temperature, top_p);
    for (int v = 0; v < V; v++)
        total += nucleus >> v & 1 ? exp(logits[v] / temperature) : 0;
    for (int v = 0; v < V; v++) {
        const double p = nucleus >> v & 1 ? exp(logits[v] / temperature) / total : 0;
        if (!(fabs(count[v] - DRAWS * p) <= 5 * sqrt(DRAWS * p * (1 - p))))
            fail_msg("temperature %g, top_p %g: token %d was drawn %d times of %d, expected %.0f",
                     temperature, top_p, v, count[v], DRAWS, DRAWS * p);
    }
}

TEST(test_temperature)
{
    check_distribution(1, 1, 31);
    check_distribution(0.5, 1, 31);
    check_distribution(3, 1, 31);
}

/* At temperature 1, the probabilities are 0.061, 0.450, 0.003, 0.450 and 0.037. Tokens 1 and 3
 * together have 0.899, with token 0 0.960, with token 4 0.997. */
TEST(test_top_p)
{
    double p[V], total = 0;
    for (int v = 0; v < V; v++)
        total += p[v] = exp(logits[v]);
    const double two = (p[1] + p[3]) / total, three = two + p[0] / total,
                 four = three + p[4] / total;
    /* there is at least one token; of two equal tokens, the first one */
    check_distribution(1, 1e-9, 2);
    check_distribution(1, two / 2 + 1e-9, 10);
    check_distribution(1, two - 1e-9, 10);
    check_distribution(1, two + 1e-9, 11);
    check_distribution(1, three + 1e-9, 27);
    check_distribution(1, four + 1e-9, 31);
    /* top_p applies after the temperature: tokens 1 and 3 have 0.9998 */
    check_distribution(0.25, 0.999, 10);
}

TEST(test_draws)
{
    const Sampling greedy = { 0, 1, 7 }, s = { 1, 1, 7 }, other = { 1, 1, 8 };
    int same = 0, twice = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        assert_int_equal(sample_token(logits, V, &greedy, i), 1);
        assert_int_equal(sample_token(logits, V, &s, i), sample_token(logits, V, &s, i));
        same += sample_token(logits, V, &s, i) == sample_token(logits, V, &other, i);
        twice += sample_token(logits, V, &s, i) == sample_token(logits, V, &s, i + 1);
    }
    assert_in_range(same, 200, 600); /* by chance 1000 sum p^2 = 409 +- 16 */
    assert_in_range(twice, 200, 600);
}

TEST(test_not_finite)
{
    const Sampling greedy = { 0, 1, 0 }, s = { 1, 0.5, 0 };
    const float nan[] = { 1, NAN, 2 }, infinite[] = { 1, 2, INFINITY };
    assert_int_equal(sample_token(nan, 3, &greedy, 0), -1);
    assert_int_equal(sample_token(infinite, 3, &s, 0), -1);
    const float large[] = { -3e38f, 3e38f, 0 };
    assert_int_equal(sample_token(large, 3, &s, 0), 1);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
