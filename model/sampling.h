/* Chooses the next token, on the host. */
#pragma once
#include <stdint.h>

typedef struct {
    double temperature; /* divides the logits; 0: always the most likely token */
    /* (0, 1]: only the smallest set of most likely tokens with this probability */
    double top_p;
    uint64_t seed;
} Sampling;

/* Chooses one of `vocab` tokens by their logits; of equally likely tokens, the token with the lower
 * id comes first. A draw depends only on (seed, number). Returns -1 if a logit is NaN or infinite.
 * Nucleus sampling [Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, sec. 3.1]
 * follows the temperature, as in transformers' generate. */
int sample_token(const float *logits, int vocab, const Sampling *s, uint64_t number);
