/* The mixture: chooses the source of the next instance. Independent of files and ranks. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* MIXTURE_MOST: maximum number of sources. MIXTURE_NAME: bytes of a name with its final zero */
enum { MIXTURE_MOST = 64, MIXTURE_NAME = 64 };

typedef struct {
    int count;
    uint64_t weight[MIXTURE_MOST]; /* > 0: ratio in units of 1e-9 */
    /* random number from seed and name: orders sources with the same deadline */
    uint64_t salt[MIXTURE_MOST];
    uint64_t all; /* the sum of the weights */
} Mixture;

/* Position in a source. */
typedef struct {
    /* epoch, instance: the source's next instance. mixed: number of instances taken since the
     * mixture last changed */
    uint64_t epoch, instance, mixed;
} SourcePosition;

/* the weight of a ratio between 1e-6 and 1e6; exact for ratios with up to 9 decimals */
uint64_t mixture_weight(double ratio);

void mixture_add(Mixture *m, const char *name, double ratio, uint64_t seed);

/* Returns the source of the next instance, after taken[s] instances of each source s. The result
 * depends only on `taken` and on the sources, not on the order in which they were added. Start with
 * taken = 0 and add 1 to taken[s] after each call that returns s. After n calls, taken[s] is the
 * share of source s, rounded up or down: |taken[s] - n weight[s] / all| < 1. */
int mixture_next(const Mixture *m, const uint64_t taken[]);

/* For a mixture that has taken taken[s] instances of each source s: an upper bound of the number of
 * instances of source s among its next `instances`. */
uint64_t mixture_needs(const Mixture *m, const uint64_t taken[], int s, uint64_t instances);
/* For the same mixture: an upper bound of the number of further instances until the mixture has
 * taken `left` more instances from source s. */
uint64_t mixture_lasts(const Mixture *m, const uint64_t taken[], int s, uint64_t left);
