/* Samples of tensors in host memory, and statistics of their rounding. */
#pragma once
#include "kernels/runtime/mesh.h"
#include "kernels/tensor.h"

/* n stored elements, a flat tensor in host memory, and their values. */
typedef struct {
    Tensor t;
    float *x;
    size_t n;
} Elements;

/* fetches whole groups of a device tensor; waits for the device */
Elements elements_fetch(Tensor t, size_t first, size_t n);
/* x in f as the CPU back end rounds it; FP8 in groups */
Elements elements_round(const double *x, size_t n, Format f);
/* stores x instead; the single scale of a tensor stays */
void elements_replace(Elements *s, const double *x);
/* as elements_fetch, only the values; malloc'ed */
double *fetch_values(Tensor t, size_t first, size_t n);
double elements_k(Elements s, size_t group); /* power of an expanded group */
void elements_free(Elements *s);

/* Divides by the factors of stored's columns, if it has factors; s: its first rows. */
void sample_without_factors(Elements *s, Tensor stored);

/* A dynamic range is that of elements that share a scale; for F32 and BF16 moments of this many. */
enum { MOMENT_GROUP = 128 };

/* Sums over groups, values and tensors; starts as 0. */
typedef struct {
    double groups, log_range;     /* groups with a value other than 0; sum of log2(max/min) */
    double k, log_range_expanded; /* sums over the same groups, with expansion */
    /* values other than 0; of these stored as 0; with the largest code */
    double values, zeros, largest;
    /* tensors compared with their source; sum of (||q-x|| / ||x||)^2 */
    double tensors, error2;
} Stats;

/* exact: the values before rounding. NULL: unknown; then values, zeros and largest count all
 * codes. */
void stats_add(Stats *st, Elements s, const double *exact);
/* Of all ranks of the group, which all call: st = their sums. */
void stats_sum(Stats *st, Ranks g);
void stats_add_error(Stats *st, const float *q, const double *x, size_t n);
double stats_error(const Stats *st); /* root mean square over tensors */
