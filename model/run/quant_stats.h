/* Samples of tensors in host memory, and statistics of their rounding. */
#pragma once
#include "kernels/runtime/mesh.h"
#include "kernels/tensor.h"

/* n stored elements of a flat tensor in host memory, and their values. */
typedef struct {
    Tensor t;
    float *x;
    size_t n;
} Elements;

/* copies whole groups of a device tensor; waits for the device */
Elements elements_fetch(Tensor t, size_t first, size_t n);
/* x rounded to format f as the CPU back end does; FP8 in groups */
Elements elements_round(const double *x, size_t n, Format f);
/* replaces the stored elements by x; a tensor's single scale stays */
void elements_replace(Elements *s, const double *x);
/* as elements_fetch, but returns only the values; malloc'ed */
double *fetch_values(Tensor t, size_t first, size_t n);
double elements_k(Elements s, size_t group); /* power of a group with dynamic range expansion */
void elements_free(Elements *s);

/* Divides the values by the factors of stored's columns, if there are factors. s: the first rows of
 * `stored`. */
void sample_without_factors(Elements *s, Tensor stored);

/* The dynamic range is measured over the elements that share a scale. F32 and BF16 moments have no
 * scale: their range is measured over this number of elements. */
enum { MOMENT_GROUP = 128 };

/* Sums over groups, values and tensors; starts as 0. */
typedef struct {
    /* groups: number of groups with a value other than 0. log_range: sum of log2(max/min) over
     * these groups */
    double groups, log_range;
    double k, log_range_expanded; /* sums over the same groups, with dynamic range expansion */
    /* values: number of values other than 0. zeros: of these, stored as 0. largest: of these,
     * stored with the largest code */
    double values, zeros, largest;
    /* tensors: number of tensors that were compared with their source. error2: sum of (||q-x|| /
     * ||x||)^2 */
    double tensors, error2;
} Stats;

/* exact: the values before rounding. NULL: these values are not known; then the counts `values`,
 * `zeros` and `largest` include all codes. */
void stats_add(Stats *st, Elements s, const double *exact);
/* Sums st over the ranks of the group; all of its ranks must call this. */
void stats_sum(Stats *st, Ranks g);
void stats_add_error(Stats *st, const float *q, const double *x, size_t n);
double stats_error(const Stats *st); /* root mean square over tensors */
