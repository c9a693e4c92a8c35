/* Entropy of rows of logits, and columns that are chosen by rank or at random (cpu/columns.c). A
 * block computes one row, which it reads several times, from the L2 cache after the first time.
 * Where the order of columns matters, thread i has the i-th of the row's equal segments. */
#include "kernels/cuda/loss.cuh"
#include "kernels/random.h"

enum { THREADS = 256, KEY_BITS = 32 };

template <typename T>
__device__ static inline Running sum_exponentials(const T *row, int vocab, float base2,
                                                  float *shared)
{
    Running r = { -FLT_MAX, 0 };
    for (int c = 8 * threadIdx.x; c < vocab; c += 8 * THREADS)
        add_pack(r, load_pack<false>(row + c, vocab - c), vocab - c, base2);
    return block_total(r, base2, shared);
}

template <typename T>
__global__ __launch_bounds__(THREADS) void row_entropy_kernel(float *entropy, const T *logits,
                                                              const int *targets, int V, int vocab,
                                                              float inverse)
{
    __shared__ float shared[32];
    const T *row = logits + (size_t)blockIdx.x * V;
    if (targets[blockIdx.x] < 0) {
        if (threadIdx.x == 0)
            entropy[blockIdx.x] = 0;
        return;
    }
    const float base2 = LOG2E * inverse;
    const Running r = sum_exponentials(row, vocab, base2, shared);
    float sum = 0; /* of exp(x - max) (max - x) */
    for (int c = threadIdx.x; c < vocab; c += THREADS) {
        const float x = (to_float(row[c]) - r.max) * inverse;
        sum -= exp2_quick(x * LOG2E) * x;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        entropy[blockIdx.x] = logf(r.total) + sum / r.total;
}

/* A number whose order, as an unsigned integer, is that of x. */
__device__ static inline uint32_t key_of(float x)
{
    const uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The sum of x over the threads before this one. shared: THREADS numbers. */
template <typename N>
__device__ static inline N sum_before(N x, N *shared)
{
    shared[threadIdx.x] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        N sum = 0;
        for (int i = 0; i < THREADS; i++) {
            const N own = shared[i];
            shared[i] = sum;
            sum += own;
        }
    }
    __syncthreads();
    const N before = shared[threadIdx.x];
    __syncthreads();
    return before;
}

/* The key of the k-th largest element: the largest key that at least k elements reach. */
template <typename T>
__device__ static inline uint32_t kth_largest(const T *row, int vocab, int k, int *shared)
{
    uint32_t key = 0;
    for (int bit = KEY_BITS - 1; bit >= 0; bit--) {
        const uint32_t next = key | 1u << bit;
        int reach[1] = { 0 };
        for (int c = threadIdx.x; c < vocab; c += THREADS)
            reach[0] += key_of(to_float(row[c])) >= next;
        block_reduce<Sum>(reach, shared);
        if (reach[0] >= k)
            key = next;
    }
    return key;
}

template <typename T>
__global__ __launch_bounds__(THREADS) void top_columns_kernel(int *columns, float *logps,
                                                              const T *logits, const int *targets,
                                                              int V, int vocab, float inverse,
                                                              int k)
{
    __shared__ int shared[THREADS];
    __shared__ float shared_sums[32];
    const T *row = logits + (size_t)blockIdx.x * V;
    columns += (size_t)blockIdx.x * k, logps += (size_t)blockIdx.x * k;
    if (targets[blockIdx.x] < 0) {
        for (int i = threadIdx.x; i < k; i += THREADS)
            columns[i] = -1, logps[i] = 0;
        return;
    }
    const Running r = sum_exponentials(row, vocab, LOG2E * inverse, shared_sums);
    const float z = r.max * inverse + logf(r.total);
    const uint32_t least = kth_largest(row, vocab, k, shared);
    const int each = (vocab + THREADS - 1) / THREADS, first = each * threadIdx.x,
              end = min(first + each, vocab);
    int above = 0, equal = 0;
    for (int c = first; c < end; c++) {
        const uint32_t key = key_of(to_float(row[c]));
        above += key > least, equal += key == least;
    }
    int total[1] = { above };
    block_reduce<Sum>(total, shared);
    int place = sum_before(above, shared), place_equal = total[0] + sum_before(equal, shared);
    for (int c = first; c < end; c++) {
        const float x = to_float(row[c]);
        const uint32_t key = key_of(x);
        const int at = key > least ? place++ : key == least ? place_equal++ : k;
        if (at < k)
            columns[at] = c, logps[at] = x * inverse - z;
    }
}

/* The first of k ascending numbers that is at least x. */
__device__ static inline int first_from(const float *sorted, int k, float x)
{
    int low = 0, high = k;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (sorted[middle] >= x)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Sorts k numbers, each by counting the smaller ones and the equal ones before it. */
__device__ static inline void sort_draws(float *sorted, const float *draw, int k)
{
    for (int i = threadIdx.x; i < k; i += THREADS) {
        int rank = 0;
        for (int j = 0; j < k; j++)
            rank += draw[j] < draw[i] || (draw[j] == draw[i] && j < i);
        sorted[rank] = draw[i];
    }
    __syncthreads();
}

template <typename T>
__global__ __launch_bounds__(THREADS) void draw_columns_kernel(int *columns, float *logps,
                                                               const T *logits, const int *targets,
                                                               int V, int vocab, float inverse,
                                                               int k, uint64_t seed)
{
    __shared__ float shared[THREADS], draw[MOST_SOFT], sorted[MOST_SOFT];
    const T *row = logits + (size_t)blockIdx.x * V;
    columns += (size_t)blockIdx.x * k, logps += (size_t)blockIdx.x * k;
    if (targets[blockIdx.x] < 0) {
        for (int i = threadIdx.x; i < k; i += THREADS)
            columns[i] = -1, logps[i] = 0;
        return;
    }
    const float base2 = LOG2E * inverse;
    const Running r = sum_exponentials(row, vocab, base2, shared);
    const float z = r.max * inverse + logf(r.total), shift = -r.max * base2;
    const int each = (vocab + THREADS - 1) / THREADS, first = each * threadIdx.x,
              end = min(first + each, vocab);
    float own = 0;
    for (int c = first; c < end; c++)
        own += exp2_quick(fmaf(to_float(row[c]), base2, shift));
    const float before = sum_before(own, shared);
    if (threadIdx.x == THREADS - 1)
        shared[0] = before + own;
    __syncthreads();
    const float total = shared[0];
    for (int i = threadIdx.x; i < k; i += THREADS)
        draw[i] = random_unit(seed, (uint64_t)blockIdx.x * k + i) * total;
    __syncthreads();
    sort_draws(sorted, draw, k);
    /* NOTE: neighbours compute the border between their segments from the same sums, so that each
     * number belongs to one segment; rounding inside a segment cannot move a number out of it */
    __shared__ float border[THREADS + 1];
    border[threadIdx.x] = before;
    if (threadIdx.x == 0)
        border[THREADS] = INFINITY;
    __syncthreads();
    float sum = before;
    int i = first_from(sorted, k, before), c = first;
    const int last = first_from(sorted, k, border[threadIdx.x + 1]);
    for (; i < last && first < end; i++) {
        while (c < end - 1 && sum + exp2_quick(fmaf(to_float(row[c]), base2, shift)) <= sorted[i])
            sum += exp2_quick(fmaf(to_float(row[c++]), base2, shift));
        columns[i] = c, logps[i] = to_float(row[c]) * inverse - z;
    }
}

void backend_row_entropy(float *entropy, Tensor logits, const int *target, int vocab,
                         float temperature)
{
    check_columns(OPERATION, logits, vocab, 1);
    if (logits.rows == 0)
        return;
    with_type(logits, [&](auto *p) {
        row_entropy_kernel<<<logits.rows, THREADS, 0, device_stream()>>>(
            entropy, p, target, logits.cols, vocab, 1 / temperature);
    });
    LAUNCH_CHECK();
}

void backend_top_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                         float temperature, int k)
{
    check_columns(OPERATION, logits, vocab, k);
    CHECK(k <= vocab, "%s: the %d largest of %d columns", OPERATION, k, vocab);
    if (logits.rows == 0)
        return;
    with_type(logits, [&](auto *p) {
        top_columns_kernel<<<logits.rows, THREADS, 0, device_stream()>>>(
            column, logp, p, target, logits.cols, vocab, 1 / temperature, k);
    });
    LAUNCH_CHECK();
}

void backend_draw_columns(int *column, float *logp, Tensor logits, const int *target, int vocab,
                          float temperature, int k, uint64_t seed)
{
    check_columns(OPERATION, logits, vocab, k);
    if (logits.rows == 0)
        return;
    with_type(logits, [&](auto *p) {
        draw_columns_kernel<<<logits.rows, THREADS, 0, device_stream()>>>(
            column, logp, p, target, logits.cols, vocab, 1 / temperature, k, seed);
    });
    LAUNCH_CHECK();
}
