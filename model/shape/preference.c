/* The table of preference losses. Names and formulas: DPO [Rafailov et al. 2023] with the label
 * smoothing of cDPO, IPO [Azar et al. 2023] with means, as its authors advise, SimPO [Meng et al.
 * 2024], APO-zero [D'Oosterlinck et al. 2024], CPO [Xu et al. 2024], ORPO [Hong et al. 2024].
 * dpo_norm is DPO with means, the default of open-instruct. */
#include "model/shape/preference.h"

#include <math.h>
#include <stddef.h>

static double sigmoid(double x)
{
    return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));
}

/* -log sigmoid(x), without overflow. */
static double softplus_of_minus(double x)
{
    return x < 0 ? log1p(exp(x)) - x : log1p(exp(-x));
}

/* -(1 - e) log s(m) - e log s(-m) with m = beta (c - r) - gamma; e: label_smoothing. */
static PairLoss by_margin(double c, double r, const Preference *p)
{
    const double m = p->beta * (c - r) - p->gamma, e = p->label_smoothing;
    const double slope = p->beta * (e * sigmoid(m) - (1 - e) * sigmoid(-m));
    return (PairLoss){ (1 - e) * softplus_of_minus(m) + e * softplus_of_minus(-m), slope, -slope };
}

/* (c - r - 1 / (2 beta))^2 */
static PairLoss ipo(double c, double r, const Preference *p)
{
    const double x = c - r - 1 / (2 * p->beta);
    return (PairLoss){ x * x, 2 * x, -2 * x };
}

/* 1 - s(beta c) + s(beta r) */
static PairLoss apo_zero(double c, double r, const Preference *p)
{
    const double x = sigmoid(p->beta * c), y = sigmoid(p->beta * r);
    return (PairLoss){ 1 - x + y, -p->beta * x * (1 - x), p->beta * y * (1 - y) };
}

/* The log odds x - log(1 - e^x) of a log-probability x <= 0. Their derivative is 1 / (1 - e^x). At
 * x = 0 the odds are infinite: larger x are treated as -1e-7, about the resolution of F32. */
static double below_zero(double x)
{
    return fmin(x, -1e-7);
}

static double log_odds(double x)
{
    return x - log(-expm1(x));
}

/* -beta log s(odds(c) - odds(r)) */
static PairLoss orpo(double c, double r, const Preference *p)
{
    const double x = below_zero(c), y = below_zero(r), ratio = log_odds(x) - log_odds(y),
                 slope = -p->beta * sigmoid(-ratio);
    return (PairLoss){ p->beta * softplus_of_minus(ratio), slope / -expm1(x), -slope / -expm1(y) };
}

static const PreferenceLoss losses[NUM_PREFERENCE_LOSSES] = {
    /* means, reference, smooths, beta, gamma, sft_weight */
    [PREFERENCE_DPO] = { "dpo", false, true, true, 0.1, 0, 0, by_margin },
    [PREFERENCE_DPO_NORM] = { "dpo_norm", true, true, true, 5, 0, 0, by_margin },
    [PREFERENCE_IPO] = { "ipo", true, true, false, 0.1, 0, 0, ipo },
    [PREFERENCE_SIMPO] = { "simpo", true, false, true, 2, 1, 0, by_margin },
    [PREFERENCE_APO_ZERO] = { "apo_zero", false, true, false, 0.1, 0, 0, apo_zero },
    [PREFERENCE_CPO] = { "cpo", false, false, true, 0.1, 0, 1, by_margin },
    [PREFERENCE_ORPO] = { "orpo", true, false, false, 0.1, 0, 1, orpo },
};

const PreferenceLoss *preference_loss(PreferenceKind kind)
{
    return kind == PREFERENCE_NONE ? NULL : &losses[kind];
}
