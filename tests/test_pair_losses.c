/* The table of preference losses: values by their published formulas, written naively; derivatives by
 * differences; extreme log-probabilities. */
#include <math.h>

#include "model/block/preference.h"
#include "tests/test.h"

static double s(double x)
{
    return 1 / (1 + exp(-x));
}

static double formula(PreferenceKind kind, double c, double r, double b, double g, double e)
{
    const double m = b * (c - r) - g, dpo = -(1 - e) * log(s(m)) - e * log(s(-m));
    switch (kind) {
    case PREFERENCE_IPO: return pow(c - r - 1 / (2 * b), 2);
    case PREFERENCE_APO_ZERO: return 1 - s(b * c) + s(b * r);
    case PREFERENCE_ORPO:
        return -b * log(s(log(exp(c) / (1 - exp(c))) - log(exp(r) / (1 - exp(r)))));
    default: return dpo;
    }
}

static Preference settings(PreferenceKind kind)
{
    const PreferenceLoss *l = preference_loss(kind);
    return (
        Preference){ kind, 0.7, kind == PREFERENCE_SIMPO ? 0.4 : 0, l->smooths ? 0.2 : 0, 0, 0 };
}

/* Log-probabilities below 0, as ORPO needs. Rounding of formulas: 1e-13. A difference with h = 1e-5
 * has an error of h^2 times the third derivative, which is below 10 here, and of 1e-16 / h. */
TEST(test_formulas)
{
    const double points[] = { -0.3, -0.9, -2.5, -6 }, h = 1e-5;
    for (PreferenceKind kind = PREFERENCE_DPO; kind < NUM_PREFERENCE_LOSSES; kind++)
        for (int i = 0; i < 16; i++) {
            const double c = points[i / 4], r = points[i % 4];
            const Preference p = settings(kind);
            const PreferenceLoss *l = preference_loss(kind);
            const PairLoss found = l->loss(c, r, &p);
            const double value = formula(kind, c, r, p.beta, p.gamma, p.label_smoothing),
                         dc = (l->loss(c + h, r, &p).value - l->loss(c - h, r, &p).value) / (2 * h),
                         dr = (l->loss(c, r + h, &p).value - l->loss(c, r - h, &p).value) / (2 * h);
            if (!(fabs(found.value - value) < 1e-13 * fmax(1, fabs(value))) ||
                !(fabs(found.chosen - dc) < 1e-8) || !(fabs(found.rejected - dr) < 1e-8))
                fail_msg("%s at %g, %g: %.15g %.9g %.9g; expected %.15g %.9g %.9g", l->name, c, r,
                         found.value, found.chosen, found.rejected, value, dc, dr);
        }
}

/* Certain and impossible sides have finite losses and derivatives. */
TEST(test_extremes)
{
    const double points[] = { 0, -1e-30, -1e4, -1e6 };
    for (PreferenceKind kind = PREFERENCE_DPO; kind < NUM_PREFERENCE_LOSSES; kind++)
        for (int i = 0; i < 16; i++) {
            const Preference p = settings(kind);
            const PairLoss f = preference_loss(kind)->loss(points[i / 4], points[i % 4], &p);
            assert_true(isfinite(f.value) && isfinite(f.chosen) && isfinite(f.rejected));
        }
}

/* Pairs of a sequence: two pairs and padding; a sequence that is one document has none. */
TEST(test_ranges)
{
    uint8_t begins[12] = { 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0 };
    int targets[12] = { 4, -1, 5, 6, -1, -1, 7, 8, -1, -1, -1, -1 };
    PairRange p = { 0 };
    assert_true(preference_next(&p, begins, 12));
    assert_true(p.begin == 0 && p.middle == 2 && p.end == 5);
    assert_true(preference_next(&p, begins, 12));
    assert_true(p.begin == 5 && p.middle == 6 && p.end == 9);
    assert_false(preference_next(&p, begins, 12));
    const PairCount n = preference_count(targets, begins, 1, 12);
    assert_true(n.pairs == 2 && n.labels == 1);
    const uint8_t one[4] = { 1, 0, 0, 0 };
    p = (PairRange){ 0 };
    assert_false(preference_next(&p, one, 4));
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
