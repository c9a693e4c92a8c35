/* Softmax, nucleus and draw in double precision. The order of the sums depends only on the
 * logits. */
#include "model/sampling.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/random.h"
#include "kernels/runtime/error.h"

typedef struct {
    int token;
    double weight;
} Candidate;

/* Compares two tokens: likely tokens come first, equally likely tokens in the order of their ids.
 * So the order is unique. */
static int compare(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return (x->token > y->token) - (x->token < y->token);
}

static int most_likely(const float *logits, int vocab)
{
    int best = 0;
    for (int v = 1; v < vocab; v++)
        if (logits[v] > logits[best])
            best = v;
    return best;
}

/* Returns how many of the sorted candidates are in the nucleus; *weight: the sum of their
 * weights. */
static int nucleus(const Candidate *c, int count, double share, double *weight)
{
    int n = 0;
    *weight = 0;
    while (n < count && (n == 0 || *weight < share))
        *weight += c[n++].weight;
    return n;
}

static int draw(const Candidate *c, int count, double weight, uint64_t bits)
{
    double left = (double)(bits >> 11) * 0x1p-53 * weight;
    int i = 0;
    while (i < count - 1 && left >= c[i].weight)
        left -= c[i++].weight;
    return c[i].token;
}

int sample_token(const float *logits, int vocab, const Sampling *s, uint64_t number)
{
    for (int v = 0; v < vocab; v++)
        if (!isfinite(logits[v]))
            return -1;
    const int best = most_likely(logits, vocab);
    if (s->temperature == 0)
        return best;
    Candidate *c = xmalloc(sizeof *c * (size_t)vocab);
    double total = 0, weight;
    for (int v = 0; v < vocab; v++) {
        c[v] = (Candidate){ v, exp(((double)logits[v] - logits[best]) / s->temperature) };
        total += c[v].weight;
    }
    qsort(c, (size_t)vocab, sizeof *c, compare);
    const int count = nucleus(c, vocab, s->top_p * total, &weight);
    const int token = draw(c, count, weight, random_bits(s->seed, number));
    free(c);
    return token;
}
