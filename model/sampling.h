/* Which token comes next, on the host. */
#pragma once
#include <stdint.h>

typedef struct {
    double   temperature;      /* logits are divided by it; 0: the most likely token, always                      */
    double   top_p;            /* (0, 1]: only the fewest most likely tokens that have this probability together */
    uint64_t seed;
} Sampling;

/* One of `vocab` tokens by their logits, the lower of equal ones first. A draw is a function of (seed, number) alone. -1: a logit
 * is NaN or infinite. Nucleus sampling: [Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, sec. 3.1], after the
 * temperature, as transformers' generate orders them. */
int sample_token(const float *logits, int vocab, const Sampling *s, uint64_t number);
