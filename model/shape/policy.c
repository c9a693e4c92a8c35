/* GRPO [Shao et al. 2024], Dr. GRPO [Liu et al. 2025], DAPO [Yu et al. 2025], CISPO [MiniMax 2025].
 * With the ratio q = p / p_old, the advantage A and the importance weight w:
 *
 *     -w min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) + beta q KL
 *     -w min(q, clip_high) A log p + beta q KL        CISPO: no derivative by min(q, clip_high)
 *     KL = e^d - d - 1 with d = log p_reference - log p; d(q KL)/d(log p) = -q d
 *
 * The q before KL makes the gradient that of KL(policy || reference), as in TRL. */
#include "model/shape/policy.h"

#include <math.h>
#include <stddef.h>

/* TRL's clip_high of CISPO is 0.2 unless it is given; TRL's documentation recommends 5. */
static const PolicyDefaults losses[NUM_POLICY_LOSSES] = {
    [POLICY_GRPO] = { "grpo", PER_SEQUENCE, 0.2, 0.2 },
    [POLICY_DR_GRPO] = { "dr_grpo", PER_CONSTANT, 0.2, 0.2 },
    [POLICY_DAPO] = { "dapo", PER_TOKEN, 0.2, 0.2 },
    [POLICY_CISPO] = { "cispo", PER_TOKEN, 0.2, 5 },
};

const PolicyDefaults *policy_defaults(PolicyKind kind)
{
    return kind == POLICY_NONE ? NULL : &losses[kind];
}

static double divergence(double d)
{
    return expm1(d) - d;
}

static void clipped_loss(PolicyLoss *l, const Policy *p, double advantage)
{
    const double q = l->ratio, clipped = fmin(fmax(q, 1 - p->clip_low), 1 + p->clip_high);
    l->clipped_low = q < 1 - p->clip_low && advantage < 0;
    l->clipped_high = q > 1 + p->clip_high && advantage > 0;
    l->value = -fmin(q * advantage, clipped * advantage);
    l->slope = l->clipped_low || l->clipped_high ? 0 : -q * advantage;
}

static void cispo_loss(PolicyLoss *l, const Policy *p, double advantage, double logp)
{
    const double factor = fmin(l->ratio, p->clip_high);
    l->clipped_high = l->ratio > p->clip_high && advantage > 0;
    l->value = -factor * advantage * logp;
    l->slope = -factor * advantage;
}

PolicyLoss policy_loss(const Policy *p, double logp, const float *values)
{
    const double advantage = values[POLICY_ADVANTAGE], generator = values[POLICY_GENERATOR],
                 reference = values[POLICY_REFERENCE],
                 old = isnan(values[POLICY_OLD]) ? logp : values[POLICY_OLD];
    PolicyLoss l = { .ratio = exp(logp - old),
                     .importance =
                         isnan(generator) ? 1 : fmin(exp(old - generator), p->importance_max),
                     .kl_old = divergence(old - logp),
                     .kl_reference = isnan(reference) ? 0 : divergence(reference - logp) };
    if (p->kind == POLICY_CISPO)
        cispo_loss(&l, p, advantage, logp);
    else
        clipped_loss(&l, p, advantage);
    l.value *= l.importance;
    l.slope *= l.importance;
    if (p->beta > 0) {
        l.value += p->beta * l.ratio * l.kl_reference;
        l.slope -= p->beta * l.ratio * (reference - logp);
    }
    return l;
}
