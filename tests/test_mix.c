/* data/mix: shares of every prefix, order, and the data that a mixture needs. test_mixture.c tests
 * files and steps of a mixture. */
#include "data/mixture.h"
#include "kernels/runtime/error.h"
#include "tests/test.h"

#include <stddef.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static Mixture mix_of(const double *ratio, int count, uint64_t seed)
{
    Mixture m = { 0 };
    for (int s = 0; s < count; s++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", s);
        mixture_add(&m, name, ratio[s], seed);
    }
    return m;
}

/* Every prefix has the exact shares, rounded up or down. */
static void check_shares(const Mixture *m, int steps)
{
    uint64_t taken[MIXTURE_MOST] = { 0 };
    for (int n = 1; n <= steps; n++) {
        taken[mixture_next(m, taken)]++;
        for (int s = 0; s < m->count; s++) {
            const __int128 off = (__int128)taken[s] * m->all - (__int128)n * m->weight[s];
            assert_true(off < (__int128)m->all && off > -(__int128)m->all);
        }
    }
}

TEST(test_shares_of_every_prefix)
{
    static const double ratios[][6] = {
        { 1 },
        { 1, 1 },
        { 0.7, 0.3 },
        { 70, 30 },
        { 1, 2 },
        { 0.999, 0.001 },
        { 1, 1, 1 },
        { 0.5, 0.3, 0.2 },
        { 0.6, 0.1, 0.1, 0.1, 0.1 },
        { 0.31, 0.17, 0.13, 0.19, 0.11, 0.09 },
        { 1e6, 1e-6 },
        { 1, 3.14159, 2.71828, 1.41421 },
    };
    for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
        int count = 0;
        while (count < 6 && ratios[i][count] > 0)
            count++;
        for (uint64_t seed = 0; seed < 3; seed++) {
            const Mixture m = mix_of(ratios[i], count, seed);
            check_shares(&m, 5000);
        }
    }
}

TEST(test_shares_of_many_random_sources)
{
    uint64_t x = 1;
    for (int round = 0; round < 40; round++) {
        double ratio[MIXTURE_MOST];
        const int count = round == 0 ? MIXTURE_MOST : 2 + round % 17;
        for (int s = 0; s < count; s++) {
            x = x * 6364136223846793005ull + 1442695040888963407ull;
            ratio[s] = exp((double)(x >> 40) / (1 << 24) * 8 - 4);
        }
        const Mixture m = mix_of(ratio, count, (uint64_t)round);
        check_shares(&m, 3000);
    }
}

TEST(test_decimals_are_exact)
{
    const double ratio[] = { 0.7, 0.2, 0.1 };
    const Mixture m = mix_of(ratio, 3, 6198);
    uint64_t taken[MIXTURE_MOST] = { 0 };
    for (int n = 1; n <= 100000; n++) {
        taken[mixture_next(&m, taken)]++;
        if (n % 10 == 0)
            assert_true(taken[0] == (uint64_t)n / 10 * 7 && taken[1] == (uint64_t)n / 10 * 2 &&
                        taken[2] == (uint64_t)n / 10);
    }
}

/* With equal shares, each pair of sequences has both sources. The order in a pair depends on the
 * seed, and not on the order of the list. */
TEST(test_order_within_the_shares)
{
    Mixture m = { 0 }, turned = { 0 }, other = { 0 };
    mixture_add(&m, "a", 1, 1), mixture_add(&m, "b", 1, 1);
    mixture_add(&turned, "b", 1, 1), mixture_add(&turned, "a", 1, 1);
    mixture_add(&other, "a", 1, 2), mixture_add(&other, "b", 1, 2);
    uint64_t taken[MIXTURE_MOST] = { 0 }, of_turned[MIXTURE_MOST] = { 0 },
             of_other[MIXTURE_MOST] = { 0 };
    int first = 0, differs = 0;
    for (int n = 0; n < 1000; n++) {
        const int s = mixture_next(&m, taken), t = mixture_next(&turned, of_turned),
                  o = mixture_next(&other, of_other);
        assert_int_equal(s, 1 - t);
        first += n % 2 == 0 && s == 0;
        differs += s != o;
        taken[s]++, of_turned[t]++, of_other[o]++;
    }
    assert_in_range(first, 200, 300);
    assert_in_range(differs, 300, 700);
}

/* A run that another version continues keeps its order. At each position, the source with the
 * lowest number of SplitMix64 comes first, seeded by FNV-1a of seed and name. The expected order
 * was computed in Python. */
TEST(test_order_stays)
{
    static const char order[] = "cdabcabddabcadbcbdcadbacbadcacbdbdacdcba";
    Mixture m = { 0 };
    for (char name[] = "a"; *name <= 'd'; ++*name)
        mixture_add(&m, name, 1, 7);
    uint64_t taken[MIXTURE_MOST] = { 0 };
    for (int n = 0; order[n]; n++) {
        const int s = mixture_next(&m, taken);
        assert_int_equal('a' + s, order[n]);
        taken[s]++;
    }
}

/* From every position: the source that runs out first decides, and a run of that many instances
 * needs no more than there is. */
TEST(test_needs_and_lasts)
{
    const double ratio[] = { 0.6, 0.25, 0.15 };
    const Mixture m = mix_of(ratio, 3, 3);
    uint64_t taken[MIXTURE_MOST] = { 0 };
    for (int n = 0; n < 200; n++) {
        uint64_t left[3] = { 600, 200, 170 }, most = UINT64_MAX;
        for (int s = 0; s < 3; s++) {
            const uint64_t lasts = mixture_lasts(&m, taken, s, left[s]);
            assert_true(mixture_needs(&m, taken, s, lasts) <= left[s]);
            assert_true(mixture_needs(&m, taken, s, lasts + 1) > left[s]);
            most = lasts < most ? lasts : most;
        }
        uint64_t then[MIXTURE_MOST];
        memcpy(then, taken, sizeof then);
        for (uint64_t i = 0; i < most; i++)
            then[mixture_next(&m, then)]++;
        for (int s = 0; s < 3; s++)
            assert_true(then[s] - taken[s] <= left[s]);
        taken[mixture_next(&m, taken)]++;
    }
    uint64_t zeros[MIXTURE_MOST] = { 0 };
    assert_int_equal(mixture_lasts(&m, zeros, 0, 600), 1000);
    assert_int_equal(mixture_needs(&m, zeros, 1, 1000), 250);
    assert_int_equal(mixture_needs(&m, zeros, 1, 1001), 251);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
