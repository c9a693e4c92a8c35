/* The losses of a policy: values by TRL's formulas, written naively; derivatives by differences;
 * missing numbers; documents and denominators. */
#include <math.h>

#include "model/block/policy.h"
#include "tests/test.h"

/* The ratio of CISPO has no derivative: it is that of `at`, where the loss is evaluated at `logp`. */
static double formula(const Policy *p, double logp, double at, const float *v)
{
    const double A = v[POLICY_ADVANTAGE], q = exp(logp - v[POLICY_OLD]),
                 w = fmin(exp((double)v[POLICY_OLD] - v[POLICY_GENERATOR]), p->importance_max),
                 d = v[POLICY_REFERENCE] - logp, kl = exp(d) - d - 1, low = 1 - p->clip_low,
                 high = 1 + p->clip_high,
                 clipped = q < low    ? low
                           : q > high ? high
                                      : q;
    if (p->kind == POLICY_CISPO)
        return -fmin(exp(at - v[POLICY_OLD]), p->clip_high) * A * logp * w + p->beta * q * kl;
    return -fmin(q * A, clipped * A) * w + p->beta * q * kl;
}

/* Ratios inside and on both sides of the range, none at its border. Rounding: 1e-13 relative. A
 * difference with h = 1e-5 has an error of h^2 times the third derivative, which is below 20 here,
 * and of 1e-15 / h. */
TEST(test_formulas)
{
    const double h = 1e-5;
    for (PolicyKind kind = POLICY_GRPO; kind < NUM_POLICY_LOSSES; kind++)
        for (int i = 0; i < 40; i++) {
            const Policy p = { kind, PER_TOKEN,  1, 0.2, kind == POLICY_CISPO ? 1.5 : 0.28,
                               1.4,  i % 2 * 0.3 };
            const double logp = -2 - 0.13 * i;
            const float v[POLICY_VALUES] = { i % 3 ? 1.5f : -0.75f,
                                             (float)(logp - 0.83 + 0.11 * (i % 16)),
                                             (float)(logp - 1 + 0.2 * (i % 9)), -3.5f };
            const PolicyLoss l = policy_loss(&p, logp, v);
            const double value = formula(&p, logp, logp, v),
                         slope = (formula(&p, logp + h, logp, v) - formula(&p, logp - h, logp, v)) /
                                 (2 * h);
            if (!(fabs(l.value - value) < 1e-13 * fmax(1, fabs(value))) ||
                !(fabs(l.slope - slope) < 1e-8))
                fail_msg("%s, %d: %.15g %.9g; expected %.15g %.9g", policy_defaults(kind)->name, i,
                         l.value, l.slope, value, slope);
            const double q = exp(logp - v[POLICY_OLD]);
            assert_true(l.clipped_low == (kind != POLICY_CISPO && q < 0.8 && v[0] < 0));
            assert_true(l.clipped_high == (q > (kind == POLICY_CISPO ? 1.5 : 1.28) && v[0] > 0));
        }
}

/* Without an old policy the ratio is 1; without a generator the weight is 1. */
TEST(test_missing)
{
    const Policy p = { POLICY_GRPO, PER_SEQUENCE, 1, 0.2, 0.2, 3, 0 };
    const float v[POLICY_VALUES] = { 2, NAN, NAN, NAN };
    PolicyLoss l = policy_loss(&p, -1.25, v);
    assert_true(l.value == -2 && l.slope == -2 && l.ratio == 1 && l.importance == 1);
    assert_true(l.kl_old == 0 && l.kl_reference == 0);
    const float generated[POLICY_VALUES] = { 2, NAN, -1.25f - (float)log(2), NAN };
    l = policy_loss(&p, -1.25, generated);
    assert_true(fabs(l.importance - 2) < 1e-6 && l.ratio == 1);
}

/* Three documents, of 2, 0 and 3 labels. */
TEST(test_count)
{
    const uint8_t begins[10] = { 1, 0, 0, 1, 0, 1, 0, 0, 0, 0 };
    const int targets[10] = { -1, 3, 4, -1, -1, -1, 5, 6, 7, -1 };
    const PolicyCount n = policy_count(targets, begins, 2, 5);
    assert_true(n.documents == 2 && n.labels == 5);
    assert_true(policy_terms(&(Policy){ .denominator = PER_TOKEN }, n) == 5);
    assert_true(policy_terms(&(Policy){ .denominator = PER_SEQUENCE }, n) == 2);
    assert_true(policy_terms(&(Policy){ .denominator = PER_CONSTANT, .constant = 8 }, n) == 16);
    assert_true(policy_terms(&(Policy){ .denominator = PER_TOKEN }, (PolicyCount){ 0 }) == 1);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
