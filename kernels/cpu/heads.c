/* Exchange of columns between rows of all heads and rows of one rank's heads. */
#include <string.h>

#include "kernels/cpu/cpu.h"

/* `count` ranks have a copy of one head. y has n gradients of each copy. The gradients of copy i
 * begin at element first + i * stride. Adds the copies in the order of the ranks, and stores the n
 * sums at element `at` of x. */
static void sum_copies(Tensor x, size_t at, Tensor y, size_t first, size_t stride, int count,
                       size_t n)
{
    float *sum = cpu_scratch(0, n), *copy = cpu_scratch(1, n);
    tensor_load(sum, y, first, n);
    for (int r = 1; r < count; r++) {
        tensor_load(copy, y, first + (size_t)r * stride, n);
        for (size_t i = 0; i < n; i++)
            sum[i] += copy[i];
    }
    tensor_store(x, at, sum, n);
}

/* Copies between x, whose rows have all heads, and y, whose rows have one rank's heads. shared:
 * number of ranks that have the same key head. */
static void exchange(Tensor y, Tensor x, Attention heads, int shared, bool join)
{
    const int ranks = y.rows / x.rows;
    const size_t size = dtype_size(x.format.dtype), N = (size_t)x.rows, part = (size_t)y.cols,
                 all = (size_t)x.cols;
    const size_t q = (size_t)(heads.H * heads.D), k = (size_t)(heads.K * heads.D),
                 width[] = { q, k, k };
    char *const whole = x.data, *const parts = y.data;
    for (size_t n = 0; n < N; n++)
        for (int r = 0; r < ranks; r++) {
            size_t own = ((size_t)r * N + n) * part, section = n * all;
            for (int i = 0; i < (part > q ? 3 : 1); own += width[i++]) {
                const int copies = i > 0 ? shared : 1;
                const size_t at = section + (size_t)(r / copies) * width[i],
                             bytes = width[i] * size;
                section += (size_t)(ranks / copies) * width[i];
                if (!join)
                    memcpy(parts + own * size, whole + at * size, bytes);
                else if (copies == 1)
                    memcpy(whole + at * size, parts + own * size, bytes);
                else if (r % copies == 0)
                    sum_copies(x, at, y, own, N * part, copies, width[i]);
            }
        }
}

void backend_heads_split(Tensor y, Tensor x, Attention heads)
{
    exchange(y, x, heads, check_exchange(OPERATION, y, x, heads), false);
}

void backend_heads_join(Tensor x, Tensor y, Attention heads)
{
    exchange(y, x, heads, check_exchange(OPERATION, y, x, heads), true);
}
