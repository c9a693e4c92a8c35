/* The rows of config_keys.c for distillation. Only config_keys.c includes this file, after
 * config_keys_rows.h. */
#pragma once
#define SCORE_SOFT_ROWS \
    OPTION( \
        "top_k", INT, "null", 0, 1, MOST_SOFT, C(top_k), \
        "score: write soft labels instead, for distillation: for each label of data.paths this " \
        "many ids with their probabilities. With distill.loss: the largest number of entries; " \
        "default: 64"), \
        WORD( \
            "top_k_by", CHOICE, "rank", \
            WORDS({ "rank", CHOOSE_TOP }, { "counts", CHOOSE_COUNTS }, \
                  { "probabilities", CHOOSE_PROBABILITIES }), \
            C(choice), \
            "how score chooses the ids. rank: the most likely, and the probability of all others " \
            "together. counts, probabilities: top_k draws from the model's distribution; a " \
            "probability is count / top_k (Sparse Logit Sampling), or the model's, renormalized " \
            "(Gemma 3)")
#define DISTILL_ROWS \
    WORD("distill.loss", CHOICE, "none", \
         WORDS({ "none", DISTILL_NONE }, { "forward_kl", DISTILL_FORWARD }, \
               { "reverse_kl", DISTILL_REVERSE }), \
         C(distill.kind), \
         "divergence between the model and soft labels that another model wrote with --score and " \
         "top_k. forward_kl: KL(labels || model); reverse_kl: KL(model || labels)"), \
        OTHER("distill.targets", STRING, "null", C(distill.targets), \
              "folder of --score=FOLDER --top_k=K with one file for data.paths, or that file"), \
        NUMBER("distill.temperature", DOUBLE, "1", 0.01, 100, C(distill.temperature), \
               "divisor of the logits of both models in the divergence; the divergence is " \
               "multiplied by its square. The soft labels must have been written with the same " \
               "number"), \
        NUMBER("distill.ce_weight", DOUBLE, "0", 0, 1, C(distill.ce_weight), \
               "weight w of the cross entropy of the labels: the loss is w CE + (1 - w) " \
               "temperature^2 KL, as means over the labels of the global batch")
