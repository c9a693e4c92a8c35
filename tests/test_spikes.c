/* Compares the scores of spikes with the textbook's formulas. Also tests the ends of the window,
 * and its text. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/random.h"
#include "model/update/spikes.h"
#include "tests/test.h"

static double number(uint64_t i)
{
    return 3 + (double)(random_bits(5, i) >> 11) * 0x1p-53;
}

/* Mean and standard deviation of numbers first .. end - 1, in long double. */
static double expected_score(double x, uint64_t first, uint64_t end)
{
    long double mean = 0, squares = 0;
    for (uint64_t i = first; i < end; i++)
        mean += number(i);
    mean /= (long double)(end - first);
    for (uint64_t i = first; i < end; i++)
        squares += (number(i) - mean) * (number(i) - mean);
    return (double)((x - mean) / sqrtl(squares / (long double)(end - first - 1)));
}

/* There is no score before 63 steps; then a score uses all steps, later the last 128. Sums of 128
 * terms have an error of 128 u of the sum, the mean 128 u 4. The numbers are within 1 of each
 * other, with a standard deviation of about 0.29. */
TEST(test_scores)
{
    SpikeWindow w = { 0 };
    for (uint64_t i = 0; i < 400; i++) {
        const SpikeScores s = spikes_add(&w, number(i), -2 * number(i));
        if (i < 63) {
            assert_true(isnan(s.loss) && isnan(s.grad_norm) && !spikes_exceed(s));
            continue;
        }
        const double expected = expected_score(number(i), i < 128 ? 0 : i - 128, i),
                     limit = 2 * 128 * 0x1p-53 * 4 / 0.2;
        assert_true(fabs(s.loss - expected) <= limit && fabs(s.grad_norm + expected) <= limit);
        assert_false(spikes_exceed(s));
        assert_int_equal(w.count, i < 127 ? i + 1 : 128);
    }
    assert_true(w.loss[0] == number(400 - 128) && w.loss[127] == number(399) &&
                w.grad_norm[0] == -2 * number(400 - 128));
}

/* A spike is 6 standard deviations above the mean, for either number, and never below the mean. It
 * is part of later windows. */
TEST(test_spikes)
{
    SpikeWindow full = { 0 };
    for (uint64_t i = 0; i < 128; i++)
        spikes_add(&full, number(i), number(i));
    const double zero = number(0) - expected_score(number(0), 0, 128) /
                                        (expected_score(1, 0, 128) - expected_score(0, 0, 128));
    const double sigma = 1 / (expected_score(1, 0, 128) - expected_score(0, 0, 128));
    for (int side = -1; side <= 1; side += 2)
        for (int k = 0; k < 2; k++) {
            SpikeWindow w = full;
            const double far = zero + side * 6.01 * sigma, near = zero + side * 5.99 * sigma;
            assert_false(spikes_exceed(spikes_add(&w, k ? near : zero, k ? zero : near)));
            w = full;
            assert_int_equal(spikes_exceed(spikes_add(&w, k ? far : zero, k ? zero : far)),
                             side > 0);
            assert_true(k ? w.loss[127] == far : w.grad_norm[127] == far);
        }
    /* a loss that jumps and stays there is a spike only for a while */
    SpikeWindow w = full;
    int spikes = 0;
    for (int i = 0; i < 128; i++)
        spikes += spikes_exceed(spikes_add(&w, 1000, number(0)));
    assert_in_range(spikes, 1, 10);
}

TEST(test_constant)
{
    SpikeWindow w = { 0 };
    for (int i = 0; i < 100; i++)
        assert_false(spikes_exceed(spikes_add(&w, 2, 0.5)));
    SpikeWindow below = w;
    const SpikeScores up = spikes_add(&w, 2.5, 0.5), down = spikes_add(&below, 1.5, 0.5);
    assert_true(isinf(up.loss) && spikes_exceed(up) && isinf(down.loss) && !spikes_exceed(down));
}

TEST(test_text)
{
    double x[SPIKES_WINDOW], y[SPIKES_WINDOW];
    for (int i = 0; i < SPIKES_WINDOW; i++) /* all sizes and all last bits */
        x[i] = (i % 2 ? -1 : 1) * ldexp(number((uint64_t)i), i * 16 - 1024 - 40 + (i < 4 ? 40 : 0));
    x[0] = 0x1p-1074;
    x[1] = -1.7976931348623157e308;
    for (int i = 0; i < SPIKES_WINDOW; i++)
        if (!isfinite(x[i]))
            x[i] = 0.1;
    for (int n = 0; n <= SPIKES_WINDOW; n += 64) {
        char *text = spikes_print(x, n);
        assert_int_equal(spikes_parse(y, text), n);
        assert_memory_equal(x, y, sizeof *x * (size_t)n);
        free(text);
    }
    static const char *const bad[] = { "x", "1 x", "1,2", "nan", "1 inf", "1e999", " ", "1 " };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(spikes_parse(y, bad[i]), -1);
    char long_text[2 * SPIKES_WINDOW + 2];
    for (int i = 0; i <= SPIKES_WINDOW; i++)
        memcpy(long_text + 2 * i, "1 ", 2);
    long_text[2 * SPIKES_WINDOW + 1] = '\0';
    assert_int_equal(spikes_parse(y, long_text), -1);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
