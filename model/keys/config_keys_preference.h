/* The rows of config_keys.c for preference pairs. Only config_keys.c includes this file, after
 * config_keys_rows.h. */
#pragma once
#define PREFERENCE_ROWS \
    WORD( \
        "preference.loss", CHOICE, "none", \
        WORDS({ "none", PREFERENCE_NONE }, { "dpo", PREFERENCE_DPO }, \
              { "dpo_norm", PREFERENCE_DPO_NORM }, { "ipo", PREFERENCE_IPO }, \
              { "simpo", PREFERENCE_SIMPO }, { "apo_zero", PREFERENCE_APO_ZERO }, \
              { "cpo", PREFERENCE_CPO }, { "orpo", PREFERENCE_ORPO }), \
        C(preference.kind), \
        "loss of preference pairs, which scripts/make_pair_shards.py writes; the formulas are in " \
        "model/shape/preference.c. none: cross entropy of all labels"), \
        OPTION("preference.beta", DOUBLE, "null", 0, TINY, 1e6, C(preference.beta), \
               "factor of the difference of log-probabilities. Default: 0.1; dpo_norm: 5; simpo: " \
               "2"), \
        OPTION("preference.gamma", DOUBLE, "null", -1, 0, 1e6, C(preference.gamma), \
               "simpo: margin between the sides. Default: 1"), \
        NUMBER("preference.label_smoothing", DOUBLE, "0", 0, 0.5, C(preference.label_smoothing), \
               "probability e that the sides of a pair are confused (cDPO): the loss is " \
               "(1 - e) L(chosen, rejected) + e L(rejected, chosen). Only dpo, dpo_norm, simpo " \
               "and cpo read this key"), \
        OPTION("preference.sft_weight", DOUBLE, "null", -1, 0, 1e6, C(preference.sft_weight), \
               "factor of the cross entropy of the chosen sides, per label of the global batch, " \
               "which is added to the loss. Default: 0; cpo and orpo: 1"), \
        OTHER("preference.reference", STRING, "null", C(preference.reference), \
              "folder of log-probabilities that --score wrote. Default: before its first step, " \
              "the run computes the log-probabilities of its pairs with the loaded weights, and " \
              "stores them in save_folder")
