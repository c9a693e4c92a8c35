/* data/shuffle: numpy's order, to the last element. */
#include "data/shuffle.h"
#include "tests/test.h"

#include <stddef.h>

#include <stdlib.h>

enum { FEW = 20 };

/* Made with numpy 2.4.6 by
 *     for n, s in [(20, 6198), (20, 34521), (1, 0), (2, 0), (65, 1), (65536, 2**32 + 5), (65537, 2**64 - 1),
 *                  (1000003, 6198)]:
 *         x = numpy.arange(n, dtype=numpy.uint32)
 *         numpy.random.Generator(numpy.random.PCG64(s)).shuffle(x)
 *         print(n, s, *x[:4], *x[-4:], (numpy.arange(1, n + 1, dtype=numpy.uint64) * x).sum()) */
static const struct {
    uint64_t n, seed;
    uint32_t first[4], last[4];
    uint64_t sum; /* of (i + 1) x[i] */
} shuffles[] = {
    { 20, 6198, { 17, 4, 14, 3 }, { 7, 9, 8, 1 }, 1873 },
    { 20, 34521, { 3, 0, 16, 12 }, { 17, 13, 14, 10 }, 2227 },
    { 65, 1, { 17, 27, 31, 16 }, { 18, 54, 13, 59 }, 70508 },
    { 65536,
      4294967301u,
      { 50167, 61274, 62567, 13645 },
      { 18465, 1411, 16067, 47313 },
      70476657438996 },
    { 65537,
      UINT64_MAX,
      { 38854, 22451, 12878, 37222 },
      { 53834, 23029, 9049, 14970 },
      70343369845460 },
    { 1000003,
      6198,
      { 896400, 797200, 915213, 811702 },
      { 248190, 454529, 237404, 904693 },
      250004460774129793 },
};

static const uint32_t order_6198[FEW] = { 17, 4,  14, 3,  5, 12, 6, 15, 18, 13,
                                          10, 11, 2,  19, 0, 16, 7, 9,  8,  1 };

TEST(test_shuffle_equals_numpy)
{
    for (size_t s = 0; s < sizeof shuffles / sizeof shuffles[0]; s++) {
        uint64_t n = shuffles[s].n, sum = 0;
        uint32_t *x = malloc(n * sizeof *x);
        assert_true(numpy_shuffle(x, n, shuffles[s].seed, NULL, NULL));
        for (uint64_t i = 0; i < n; i++)
            sum += (i + 1) * x[i];
        assert_memory_equal(x, shuffles[s].first, sizeof shuffles[s].first);
        assert_memory_equal(x + n - 4, shuffles[s].last, sizeof shuffles[s].last);
        assert_int_equal(sum, shuffles[s].sum);
        free(x);
    }
}

TEST(test_shuffle_of_few)
{
    uint32_t x[FEW] = { 99, 99 };
    numpy_shuffle(x, 0, 0, NULL, NULL);
    assert_int_equal(x[0], 99);
    numpy_shuffle(x, 1, 0, NULL, NULL);
    assert_int_equal(x[0], 0);
    numpy_shuffle(x, 2, 0, NULL, NULL);
    assert_int_equal(x[0], 0);
    assert_int_equal(x[1], 1);
    numpy_shuffle(x, FEW, 6198, NULL, NULL);
    assert_memory_equal(x, order_6198, sizeof x);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
