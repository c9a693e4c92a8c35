/* Policy gradients: the model is trained on texts that it, or an earlier version of it, generated,
 * with an advantage for each token. Names, formulas and defaults are those of TRL's GRPO trainer. */
#pragma once
#include <stdbool.h>

typedef enum {
    POLICY_NONE,
    POLICY_GRPO,
    POLICY_DR_GRPO,
    POLICY_DAPO,
    POLICY_CISPO,
    NUM_POLICY_LOSSES
} PolicyKind;

/* What divides the sum of the losses of a step's labels. PER_DEFAULT: the loss's own denominator */
typedef enum { PER_DEFAULT = -1, PER_TOKEN, PER_SEQUENCE, PER_CONSTANT } Denominator;

/* Settings of a run (section `policy` of the configuration). */
typedef struct {
    PolicyKind kind; /* POLICY_NONE: the loss is cross entropy */
    Denominator denominator;
    double constant;            /* of PER_CONSTANT: labels of a document */
    double clip_low, clip_high; /* the ratio is clipped to 1 - clip_low and 1 + clip_high */
    double importance_max;      /* largest importance weight */
    double beta;                /* factor of the divergence from the reference model */
} Policy;

/* The stored values of a token: NaN where there is none. Without POLICY_OLD, the policy before the
 * step is the policy itself; without POLICY_GENERATOR, it is the generator. */
enum { POLICY_ADVANTAGE, POLICY_OLD, POLICY_GENERATOR, POLICY_REFERENCE, POLICY_VALUES };

typedef struct {
    double value, slope;         /* the loss, and its derivative by the log-probability */
    double ratio;                /* q = p / p_old */
    double importance;           /* min(p_old / p_generator, importance_max) */
    double kl_old, kl_reference; /* estimates e^d - d - 1, d: log-probability minus the policy's */
    bool clipped_low, clipped_high;
} PolicyLoss;

/* The loss of a label with log-probability `logp`. values: POLICY_VALUES numbers. */
PolicyLoss policy_loss(const Policy *p, double logp, const float *values);

typedef struct {
    const char *name;
    Denominator denominator;
    double clip_low, clip_high; /* defaults */
} PolicyDefaults;
const PolicyDefaults *policy_defaults(PolicyKind kind);
