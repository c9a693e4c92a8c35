/* Samples of tensors in host memory, and what rounding did to them. */
#pragma once
#include "kernels/tensor.h"

/* n elements as stored, a flat tensor in host memory, and their values. */
typedef struct { Tensor t; float *x; size_t n; } Sample;

Sample  sample_fetch(Tensor t, size_t first, size_t n);    /* of a device tensor, whole groups; waits */
Sample  sample_round(const double *x, size_t n, Format f); /* x in f as the CPU back end rounds it; FP8 in groups */
void    sample_again(Sample *s, const double *x);          /* x instead; a tensor's one scale stays */
double *sample_values(Tensor t, size_t first, size_t n);   /* as sample_fetch, the values alone; malloc'ed */
double  sample_k(Sample s, size_t group);                  /* power of an expanded group */
void    sample_free(Sample *s);

/* Whose dynamic range counts: the elements that share a scale; of F32 and BF16 moments so many. */
enum { MOMENT_GROUP = 128 };

/* Sums over groups, values and tensors; starts as 0. */
typedef struct {
    double groups, log_range;           /* that hold a value other than 0; of log2(max/min)                       */
    double k, log_range_expanded;       /* of the same groups, with expansion                                     */
    double values, zeros, largest;      /* other than 0; stored as 0; with the largest code                       */
    double tensors, error2, log_error;  /* compared with their source; of (||q-x|| / ||x||)^2 and its log         */
} Stats;

/* exact: what the sample was rounded from. NULL: unknown; then values, zeros and largest count all codes. */
void   stats_add(Stats *st, Sample s, const double *exact);
void   stats_add_error(Stats *st, const float *q, const double *x, size_t n);
double stats_error(const Stats *st);            /* root mean square over tensors */
double stats_typical_error(const Stats *st);    /* geometric mean over tensors */

/* log2(max |x| / min |x|) over values other than 0; -1 if there is none. */
double range_log2(const double *x, size_t n);
