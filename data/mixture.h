/* The mixture: from which source the next instance is. Knows neither files nor ranks. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum { MIXTURE_MOST = 64, MIXTURE_NAME = 64 }; /* sources; bytes of a name with its final zero */

typedef struct {
    int count;
    uint64_t weight[MIXTURE_MOST]; /* > 0: ratio in units of 1e-9 */
    /* random order, from seed and name, for sources that are due at the same time */
    uint64_t salt[MIXTURE_MOST];
    uint64_t all; /* the sum of the weights */
} Mixture;

/* Position in a source: its next instance, and how many it gave since the mixture last changed. */
typedef struct {
    uint64_t epoch, instance, mixed;
} SourcePosition;

/* the weight of a ratio from 1e-6 to 1e6; decimals of up to 9 places are exact */
uint64_t mixture_weight(double ratio);

/* Adds a source. */
void mixture_add(Mixture *m, const char *name, double ratio, uint64_t seed);

/* The source of the next instance, after taken[s] instances of each source s. Depends on nothing
 * else, not even on the order in which sources were added. If it is called repeatedly from zeros
 * on, and each time the chosen source is counted, every source has its share of the first n
 * instances, rounded up or down, for every n: |taken[s] - n weight[s] / all| < 1. */
int mixture_next(const Mixture *m, const uint64_t taken[]);

/* For a mixture that has given taken[]. needs: an upper bound of how many of the mixture's next
 * `instances` come from source s. lasts: an upper bound of how many instances the mixture gives
 * until source s has given `left` more. */
uint64_t mixture_needs(const Mixture *m, const uint64_t taken[], int s, uint64_t instances);
uint64_t mixture_lasts(const Mixture *m, const uint64_t taken[], int s, uint64_t left);
