/* The rows of config_keys.c for policy gradients. Only config_keys.c includes this file, after
 * config_keys_rows.h. */
#pragma once
#define POLICY_ROWS \
    WORD("policy.loss", CHOICE, "none", \
         WORDS({ "none", POLICY_NONE }, { "grpo", POLICY_GRPO }, { "dr_grpo", POLICY_DR_GRPO }, \
               { "dapo", POLICY_DAPO }, { "cispo", POLICY_CISPO }), \
         C(policy.kind), \
         "loss of texts that the model generated, with advantages: next to each shard a.npy lies " \
         "a.policy.f32 with four float32 numbers for each token. The formulas are in " \
         "model/shape/policy.c. none: cross entropy of all labels"), \
        WORD("policy.denominator", CHOICE, "null", \
             WORDS({ "token", PER_TOKEN }, { "sequence", PER_SEQUENCE }, \
                   { "constant", PER_CONSTANT }), \
             C(policy.denominator), \
             "what divides the sum of the labels' losses. token: the labels of the global batch; " \
             "sequence: each document by its own labels, and the sum by the number of documents; " \
             "constant: policy.constant times the number of documents. Default: grpo: sequence; " \
             "dr_grpo: constant; dapo and cispo: token"), \
        NUMBER("policy.constant", DOUBLE, "512", 1, 1e9, C(policy.constant), \
               "denominator constant: labels of a document, usually the longest completion"), \
        OPTION("policy.clip_low", DOUBLE, "null", -1, 0, 1, C(policy.clip_low), \
               "the ratio of the probabilities of policy and old policy is clipped to " \
               "1 - clip_low from below. Default: 0.2; cispo does not read this key"), \
        OPTION("policy.clip_high", DOUBLE, "null", -1, 0, 1e6, C(policy.clip_high), \
               "the ratio is clipped to 1 + clip_high from above, with cispo to clip_high. " \
               "Default: 0.2; cispo: 5"), \
        NUMBER("policy.importance_max", DOUBLE, "3", 0, 1e9, C(policy.importance_max), \
               "largest importance weight, the ratio of the probabilities of old policy and " \
               "generator, by which a label's loss is multiplied"), \
        NUMBER( \
            "policy.beta", DOUBLE, "0", 0, 1e6, C(policy.beta), \
            "factor of the divergence from the reference model, whose log-probabilities are in " \
            "a.policy.f32")
