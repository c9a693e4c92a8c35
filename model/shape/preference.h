/* Losses of preference pairs: DPO and related losses. A pair has two sides, which answer the same
 * prompt: a chosen and a rejected document. */
#pragma once
#include <stdbool.h>

typedef enum {
    PREFERENCE_NONE,
    PREFERENCE_DPO,
    PREFERENCE_DPO_NORM,
    PREFERENCE_IPO,
    PREFERENCE_SIMPO,
    PREFERENCE_APO_ZERO,
    PREFERENCE_CPO,
    PREFERENCE_ORPO,
    NUM_PREFERENCE_LOSSES
} PreferenceKind;

/* Settings of a run (section `preference` of the configuration). */
typedef struct {
    PreferenceKind kind; /* PREFERENCE_NONE: the loss is cross entropy */
    double beta, gamma, label_smoothing;
    double sft_weight; /* factor of the chosen sides' mean cross entropy */
    char *reference;   /* a folder of --score; NULL: the run scores its data when it starts */
} Preference;

typedef struct {
    double value, chosen, rejected; /* the loss, and its derivatives by the two arguments */
} PairLoss;

typedef struct {
    const char *name;
    bool means;     /* a side's log-probability is the mean over its labels; false: the sum */
    bool reference; /* minus the log-probability under the reference model */
    bool smooths;   /* reads label_smoothing */
    double beta, gamma, sft_weight; /* defaults */
    /* c, r: log-probabilities of the chosen and the rejected side, as the members above say */
    PairLoss (*loss)(double c, double r, const Preference *p);
} PreferenceLoss;

const PreferenceLoss *preference_loss(PreferenceKind kind);
