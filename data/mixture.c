/* Instance j of a source with the share w = weight / all belongs between positions j / w and (j +
 * 1) / w of the mixture: if instance j came earlier, the source would be a whole instance ahead; if
 * instance j came later, the source would be a whole instance behind. (j + 1) / w is the deadline
 * of instance j. Of the instances that may come now, the instance with the earliest deadline comes
 * first. This rule keeps every deadline, since the shares sum to 1 [Baruah et al. 1996,
 * "Proportionate progress"]. Sources with the same deadline come in random order. A fixed order
 * would be wrong: with two equal shares and two ranks, each rank would read one source only. */
#include "data/mixture.h"

#include "data/hash.h"

#include <math.h>
#include <string.h>

typedef unsigned __int128 Uint128;

uint64_t mixture_weight(double ratio)
{
    return (uint64_t)llround(ratio * 1e9);
}

void mixture_add(Mixture *m, const char *name, double ratio, uint64_t seed)
{
    const int s = m->count++;
    m->weight[s] = mixture_weight(ratio);
    m->salt[s] = hash_bytes(hash_bytes(HASH_OF_NOTHING, &seed, sizeof seed), name, strlen(name));
    m->all += m->weight[s];
}

static uint64_t sum(const Mixture *m, const uint64_t taken[])
{
    uint64_t n = 0;
    for (int s = 0; s < m->count; s++)
        n += taken[s];
    return n;
}

/* a * b / c, rounded down or up. */
static uint64_t share(uint64_t a, uint64_t b, uint64_t c, bool up)
{
    return (uint64_t)(((Uint128)a * b + (up ? c - 1 : 0)) / c);
}

/* A random number that depends on a position and a source (the finalizer of SplitMix64). */
static uint64_t dice(uint64_t position, uint64_t salt)
{
    uint64_t x = salt + position * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

int mixture_next(const Mixture *m, const uint64_t taken[])
{
    const uint64_t n = sum(m, taken);
    uint64_t first_deadline = UINT64_MAX, lowest = 0;
    int best = 0;
    for (int s = 0; s < m->count; s++) {
        if ((Uint128)taken[s] * m->all >= (Uint128)(n + 1) * m->weight[s])
            continue; /* the instance comes too early here */
        const uint64_t deadline = share(taken[s] + 1, m->all, m->weight[s], true),
                       number = dice(n, m->salt[s]);
        if (deadline < first_deadline || (deadline == first_deadline && number < lowest)) {
            first_deadline = deadline;
            lowest = number;
            best = s;
        }
    }
    return best;
}

uint64_t mixture_needs(const Mixture *m, const uint64_t taken[], int s, uint64_t instances)
{
    const uint64_t end = share(sum(m, taken) + instances, m->weight[s], m->all, true);
    return end > taken[s] ? end - taken[s] : 0;
}

uint64_t mixture_lasts(const Mixture *m, const uint64_t taken[], int s, uint64_t left)
{
    const uint64_t n = sum(m, taken), end = share(taken[s] + left, m->all, m->weight[s], false);
    return end > n ? end - n : 0;
}
