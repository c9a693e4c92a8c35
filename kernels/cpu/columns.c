/* What scoring and metrics read of the rows of logits: entropy, and columns that are chosen by rank
 * or at random. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/random.h"

/* Loads a row, divided by the temperature, and returns its log sum exp. */
static double load_row(float *x, Tensor logits, int n, int vocab, float temperature)
{
    double max = -INFINITY, sum = 0;
    tensor_load(x, logits, (size_t)n * (size_t)logits.cols, (size_t)logits.cols);
    for (int j = 0; j < vocab; j++) {
        x[j] /= temperature;
        max = fmax(max, x[j]);
    }
    for (int j = 0; j < vocab; j++)
        sum += exp(x[j] - max);
    return max + log(sum);
}

void backend_row_entropy(float *entropy, Tensor logits, const int *target, int vocab,
                         float temperature)
{
    check_columns(OPERATION, logits, vocab, 1);
    float *x = cpu_scratch(0, (size_t)logits.cols);
    for (int n = 0; n < logits.rows; n++) {
        double sum = 0;
        const double z = target[n] >= 0 ? load_row(x, logits, n, vocab, temperature) : 0;
        for (int j = 0; j < vocab && target[n] >= 0; j++)
            sum += exp(x[j] - z) * (z - x[j]);
        entropy[n] = (float)sum;
    }
}

/* Returns the k-th largest of n numbers. */
static float kth_largest(const float *x, int n, int k)
{
    float *best = cpu_scratch(1, (size_t)k); /* the largest numbers so far, in descending order */
    for (int j = 0; j < n; j++) {
        if (j >= k && x[j] <= best[k - 1])
            continue;
        int at = j < k ? j : k - 1;
        for (; at > 0 && best[at - 1] < x[j]; at--)
            best[at] = best[at - 1];
        best[at] = x[j];
    }
    return best[k - 1];
}

static void top_of_row(int *column, const float *x, int vocab, int k)
{
    const float least = kth_largest(x, vocab, k);
    int at = 0;
    for (int j = 0; j < vocab; j++)
        if (x[j] > least)
            column[at++] = j;
    for (int j = 0; j < vocab && at < k; j++)
        if (x[j] == least)
            column[at++] = j;
}

/* first: number of the row's first draw */
static void draw_from_row(int *column, const float *x, int vocab, double z, int k, uint64_t seed,
                          uint64_t first)
{
    float *sum = cpu_scratch(1, (size_t)vocab);
    double total = 0;
    for (int j = 0; j < vocab; j++)
        sum[j] = (float)(total += exp(x[j] - z));
    for (int i = 0; i < k; i++) {
        const float u = random_unit(seed, first + (uint64_t)i) * sum[vocab - 1];
        int low = 0, high = vocab - 1; /* the first column whose sum is above u */
        while (low < high) {
            const int middle = (low + high) / 2;
            if (sum[middle] > u)
                high = middle;
            else
                low = middle + 1;
        }
        int at = i; /* in ascending order */
        for (; at > 0 && column[at - 1] > low; at--)
            column[at] = column[at - 1];
        column[at] = low;
    }
}

static void choose(const char *op, int *column, float *logp, Tensor logits, const int *target,
                   int vocab, float temperature, int k, bool draws, uint64_t seed)
{
    check_columns(op, logits, vocab, k);
    CHECK(draws || k <= vocab, "%s: the %d largest of %d columns", op, k, vocab);
    float *x = cpu_scratch(0, (size_t)logits.cols);
    for (int n = 0; n < logits.rows; n++, column += k, logp += k) {
        const double z = target[n] >= 0 ? load_row(x, logits, n, vocab, temperature) : 0;
        if (target[n] >= 0 && draws)
            draw_from_row(column, x, vocab, z, k, seed, (uint64_t)n * (uint64_t)k);
        else if (target[n] >= 0)
            top_of_row(column, x, vocab, k);
        for (int i = 0; i < k; i++) {
            column[i] = target[n] >= 0 ? column[i] : -1;
            logp[i] = target[n] >= 0 ? (float)(x[column[i]] - z) : 0;
        }
    }
}

void backend_top_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                         float temperature, int k)
{
    choose(OPERATION, column, logp, logits, target, vocab, temperature, k, false, 0);
}

void backend_draw_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                          float temperature, int k, uint64_t seed)
{
    choose(OPERATION, column, logp, logits, target, vocab, temperature, k, true, seed);
}
