/* Compares the rotary table with transformers 5.23 with the same settings
 * (_compute_yarn_parameters). Its frequencies are F32 after a power, a product and a sum. Our table
 * is F32, too, so both agree to 4 u. A frequency is the angle of position 1. */
#include <math.h>
#include <stddef.h>

#include "model/shape/rope_table.h"
#include "tests/test.h"

/* YaRN, and four of its frequencies, from pair `first` on. */
typedef struct {
    int D;
    double theta, factor;
    int original;
    double fast, slow, given; /* given: attention_factor, 0: none */
    int first;
    double f[4], attention_factor;
} Case;

static const Case cases[] = {
    { 8,
      1000,
      8,
      128,
      2,
      0.5,
      0,
      0,
      { 1, 0.17782793939, 0.01778781228, 7.0292665623e-4 },
      1.2079441541679836 },
    { 128,
      5e5,
      8,
      8192,
      32,
      1,
      0,
      18,
      { 0.02495540865, 0.01928275451, 0.0148556903, 0.01140733995 },
      1.2079441541679836 },
    /* the ramp begins before the first pair; has length 0; ends before it begins, in two cases; is
     * limited to D - 1 */
    { 8,
      1000,
      4,
      128,
      32,
      1,
      0,
      0,
      { 1, 0.11114246398, 0.00790569466, 0.00140585331 },
      1.138629436111989 },
    { 8,
      1000,
      4,
      6,
      32,
      1,
      0,
      0,
      { 1, 0.04445698485, 0.00790569466, 0.00140585331 },
      1.138629436111989 },
    { 8,
      1000,
      4,
      1,
      32,
      1,
      0,
      0,
      { 1, 0.17782793939, 0.03162277862, 0.00562341325 },
      1.138629436111989 },
    { 8,
      10,
      4,
      1000000000,
      32,
      1,
      0,
      0,
      { 0.25, 0.14058533311, 0.07905694097, 0.04445698485 },
      1.138629436111989 },
    { 8, 100, 4, 20000, 256, 1, 0, 0, { 1, 0.31622776389, 0.1, 0.02687936090 }, 1.138629436111989 },
    /* a given attention factor; a factor of 1 */
    { 8, 100, 4, 5000, 32, 1, 1.5, 0, { 1, 0.31622776389, 0.1, 0.02569350600 }, 1.5 },
    { 8, 1000, 1, 128, 2, 0.5, 0, 0, { 1, 0.17782793939, 0.03162277862, 0.00562341325 }, 1 },
};

static void check_near(const char *what, int i, double found, double expected)
{
    if (!(fabs(found - expected) <= 4 * 0x1p-24 * expected))
        fail_msg("case %d, %s: %.10g, expected %.10g", i, what, found, expected);
}

TEST(test_yarn)
{
    for (int i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        const Case *k = &cases[i];
        const ModelConfig c = { .head_dim = k->D,
                                .rope_theta = k->theta,
                                .rope_scaling = { .type = ROPE_YARN,
                                                  .factor = k->factor,
                                                  .original_length = k->original,
                                                  .beta_fast = k->fast,
                                                  .beta_slow = k->slow,
                                                  .attention_factor = k->given } };
        float scaled[2 * 128], plain[2 * 128];
        rope_table(scaled, &c, ROTATION_SCALED, 2);
        rope_table(plain, &c, ROTATION_PLAIN, 2);
        assert_true(fabs(rope_attention_factor(&c) - k->attention_factor) <= 1e-15);
        for (int p = 0; p < 4; p++) {
            const float *now = &scaled[k->D + 2 * (k->first + p)],
                        *then = &plain[k->D + 2 * (k->first + p)];
            check_near("scaled", i, atan2(now[1], now[0]), k->f[p]);
            check_near("attention factor", i, hypot(now[0], now[1]), k->attention_factor);
            check_near("not scaled", i, atan2(then[1], then[0]),
                       pow(k->theta, -2.0 * (k->first + p) / k->D));
            check_near("not scaled", i, hypot(then[0], then[1]), 1);
            assert_true(scaled[2 * (k->first + p)] == (float)k->attention_factor &&
                        scaled[2 * (k->first + p) + 1] == 0);
        }
    }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
