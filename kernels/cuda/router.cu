/* The router of an MLP of experts. A warp processes a token; each lane has every 32nd logit.
 *
 * route takes three kernels. The first one chooses the experts of each token, and counts the tokens
 * of each expert in each block of tokens. The second one adds the counts of earlier blocks, expert
 * by expert. In the third one, a thread processes an expert, and visits the block's tokens in
 * order. So the order of rows does not depend on the order of threads.
 *
 * Statistics have two stages: sums over BLOCK_TOKENS tokens in F32, then sums of these sums in
 * F64. */
#include "kernels/cuda/vector.cuh"

enum {
    MOST_EXPERTS = 256,
    MOST_TOP_K = 16,
    THREADS = 256,
    WARPS = THREADS / 32,
    BLOCK_TOKENS = 64,
    EACH = MOST_EXPERTS / 32 /* logits of a lane */
};

static void check_sizes(const char *op, Routing r)
{
    if (r.experts > MOST_EXPERTS || r.top_k > MOST_TOP_K)
        die("%s: %d of %d experts per token; the CUDA back end supports up to %d of %d", op,
            r.top_k, r.experts, (int)MOST_TOP_K, (int)MOST_EXPERTS);
}

static int token_blocks(int tokens)
{
    return (int)ceil_div(tokens, BLOCK_TOKENS);
}

/* ---- one token ------------------------------------------------------------------------------- */

/* A token's logits, and their softmax. Lane l has the experts l + 32 i. Experts from E on have p =
 * 0. */
struct TokenSoftmax {
    float logit[EACH], p[EACH], z; /* z = log sum exp of the logits */
};

__device__ static TokenSoftmax softmax_of(const float *logits, int E)
{
    const int lane = threadIdx.x % 32;
    TokenSoftmax t;
    float m = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        t.logit[i] = lane + 32 * i < E ? logits[lane + 32 * i] : -INFINITY;
        m = fmaxf(m, t.logit[i]);
    }
    m = warp_max(m);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        t.p[i] = lane + 32 * i < E ? expf(t.logit[i] - m) : 0.0f;
        sum += t.p[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        t.p[i] /= sum;
    t.z = m + logf(sum);
    return t;
}

/* Returns a number above 0. The numbers have the order of x; -0 and 0 give the same number. */
__device__ static uint32_t ordered(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? max(~bits, 1u) : bits | 1u << 31;
}

/* Chooses the experts with the K largest logits or, with a bias, p + bias; of equal ones,
 * those with the lower index. Lane j < K returns the j-th expert, whose p is in `p`. */
__device__ static int choose(const TokenSoftmax &t, const float *bias, int E, int K, float &p)
{
    const int lane = threadIdx.x % 32;
    uint32_t key[EACH]; /* 0: no expert, or an expert that is already chosen */
    int chosen = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = lane + 32 * i;
        key[i] = e < E ? ordered(bias ? t.p[i] + bias[e] : t.logit[i]) : 0;
    }
    for (int j = 0; j < K; j++) {
        uint32_t best = 0;
        int index = MOST_EXPERTS;
        float mine = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            best = max(best, key[i]);
        best = __reduce_max_sync(0xffffffffu, best);
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (key[i] == best)
                index = lane + 32 * i, mine = t.p[i];
        index = __reduce_min_sync(0xffffffffu, index);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i == index)
                key[i] = 0;
        mine = __shfl_sync(0xffffffffu, mine, index % 32);
        if (lane == j)
            chosen = index, p = mine;
    }
    return chosen;
}

/* ---- route ----------------------------------------------------------------------------------- */

/* Sets count (E, blocks): the number of a block's tokens for each expert. */
__global__ __launch_bounds__(THREADS) void choose_kernel(Routing r, int *count, const float *logits,
                                                         const float *bias, bool normalize)
{
    __shared__ int counted[MOST_EXPERTS];
    const int lane = threadIdx.x % 32, first = blockIdx.x * BLOCK_TOKENS;
    const int E = r.experts, K = r.top_k;
    for (int e = threadIdx.x; e < E; e += THREADS)
        counted[e] = 0;
    __syncthreads();
    for (int n = first + threadIdx.x / 32; n < min(first + BLOCK_TOKENS, r.tokens); n += WARPS) {
        const TokenSoftmax t = softmax_of(logits + (size_t)n * E, E);
        float p = 0;
        const int expert = choose(t, bias, E, K, p);
        const float sum = warp_sum(lane < K ? p : 0.0f);
        if (lane < K) {
            r.expert[(size_t)n * K + lane] = expert;
            r.weight[(size_t)n * K + lane] = normalize ? p / sum : p;
            atomicAdd(&counted[expert], 1);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS)
        count[e * gridDim.x + blockIdx.x] = counted[e];
}

/* Each block processes one expert. Replaces its counts by the sums of earlier counts; total[e] gets
 * the sum of all counts. */
__global__ __launch_bounds__(THREADS) void add_counts_kernel(int *count, int *total, int blocks)
{
    __shared__ int sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    count += (size_t)blockIdx.x * blocks;
    for (int first = 0; first < blocks; first += THREADS) {
        const int i = first + threadIdx.x, own = i < blocks ? count[i] : 0;
        int sum = own;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, sum, o);
            sum += lane >= o ? other : 0;
        }
        if (lane == 31)
            sums[warp] = sum;
        __syncthreads();
        int all = 0;
        for (int w = 0; w < WARPS; w++) {
            sum += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        if (i < blocks)
            count[i] = before + sum - own;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        total[blockIdx.x] = before;
}

/* Returns the first row of expert threadIdx.x; for expert E, the end of all rows. */
__device__ static int first_row(const int *total, int E, int *sums)
{
    const int e = threadIdx.x;
    sums[e] = e < E ? (total[e] + EXPERT_ROWS - 1) / EXPERT_ROWS * EXPERT_ROWS : 0;
    __syncthreads();
    for (int o = 1; o < MOST_EXPERTS; o <<= 1) {
        const int other = e >= o ? sums[e - o] : 0;
        __syncthreads();
        sums[e] += other;
        __syncthreads();
    }
    return e > 0 ? sums[e - 1] : 0;
}

/* offset (E, blocks): number of an expert's tokens in earlier blocks. */
__global__ __launch_bounds__(THREADS) void place_kernel(Routing r, const int *offset,
                                                        const int *total)
{
    __shared__ int sums[MOST_EXPERTS], expert[BLOCK_TOKENS * MOST_TOP_K];
    const int E = r.experts, K = r.top_k, e = threadIdx.x, first = blockIdx.x * BLOCK_TOKENS * K;
    const int count = min(BLOCK_TOKENS * K, r.tokens * K - first);
    const int begin = first_row(total, E, sums);
    for (int i = threadIdx.x; i < count; i += THREADS)
        expert[i] = r.expert[first + i];
    __syncthreads();
    if (blockIdx.x == 0 && e < E)
        r.first[e] = begin;
    if (blockIdx.x == 0 && e == E - 1)
        r.first[E] = sums[e];
    if (e >= E)
        return;
    int row = begin + offset[e * gridDim.x + blockIdx.x];
    for (int i = 0; i < count; i++)
        if (expert[i] == e) {
            r.row[first + i] = row;
            r.assignment[row++] = first + i;
        }
}

static_assert(THREADS == MOST_EXPERTS, "first_row and place_kernel have a thread for each expert");

void backend_route(Routing r, Tensor logits, const float *bias, bool normalize)
{
    check_route(r, logits);
    check_sizes(OPERATION, r);
    const int E = r.experts, blocks = token_blocks(r.tokens),
              rows = routing_rows(r.tokens, E, r.top_k);
    int *count = (int *)device_scratch(((size_t)blocks + 1) * E * sizeof(int), SCRATCH_0),
        *total = count + (size_t)blocks * E;
    choose_kernel<<<blocks, THREADS, 0, device_stream()>>>(r, count, (const float *)logits.data,
                                                           bias, normalize);
    LAUNCH_CHECK();
    add_counts_kernel<<<E, THREADS, 0, device_stream()>>>(count, total, blocks);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemsetAsync(r.assignment, 0xff, rows * sizeof(int), device_stream()));
    place_kernel<<<blocks, THREADS, 0, device_stream()>>>(r, count, total);
    LAUNCH_CHECK();
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* partial (groups, blocks, 2E + 2). Each block sums over BLOCK_TOKENS tokens of a group of `tokens`
 * tokens. */
__global__ __launch_bounds__(THREADS) void stats_kernel(float *partial, const float *logits,
                                                        const int *expert, int tokens, int E, int K)
{
    __shared__ int counted[MOST_EXPERTS];
    __shared__ float sums[WARPS][MOST_EXPERTS + 2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = 2 * E + 2;
    const int first = blockIdx.x * BLOCK_TOKENS, count = min(BLOCK_TOKENS, tokens - first);
    const size_t token = (size_t)blockIdx.y * tokens + first;
    float p[EACH] = {}, z = 0, entropy = 0;
    for (int e = threadIdx.x; e < E; e += THREADS)
        counted[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count * K; i += THREADS)
        atomicAdd(&counted[expert[token * K + i]], 1);
    for (int n = warp; n < count; n += WARPS) {
        const TokenSoftmax t = softmax_of(logits + (token + n) * E, E);
        z += t.z * t.z;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            p[i] += t.p[i];
            entropy += t.p[i] > 0 ? t.p[i] * (t.z - t.logit[i]) : 0.0f;
        }
    }
    entropy = warp_sum(entropy);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < E)
            sums[warp][lane + 32 * i] = p[i];
    if (lane == 0)
        sums[warp][E] = z, sums[warp][E + 1] = entropy;
    __syncthreads();
    partial += ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * width;
    for (int e = threadIdx.x; e < E + 2; e += THREADS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += sums[w][e];
        partial[E + e] = sum;
        if (e < E)
            partial[e] = (float)counted[e];
    }
}

__global__ __launch_bounds__(THREADS) void add_stats_kernel(float *stats, const float *partial,
                                                            int blocks, int width)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= width)
        return;
    double sum = 0;
    partial += (size_t)blockIdx.y * blocks * width;
    for (int b = 0; b < blocks; b++)
        sum += partial[(size_t)b * width + i];
    stats[(size_t)blockIdx.y * width + i] = (float)sum;
}

void backend_router_stats(Tensor stats, Tensor logits, Routing r)
{
    const int groups = stats.rows, width = router_stats_width(r.experts);
    check_router_stats(stats, logits, r);
    check_sizes(OPERATION, r);
    const int tokens = r.tokens / groups, blocks = token_blocks(tokens);
    float *partial =
        (float *)device_scratch((size_t)groups * blocks * width * sizeof(float), SCRATCH_0);
    stats_kernel<<<dim3(blocks, groups), THREADS, 0, device_stream()>>>(
        partial, (const float *)logits.data, r.expert, tokens, r.experts, r.top_k);
    LAUNCH_CHECK();
    add_stats_kernel<<<dim3((unsigned)ceil_div(width, THREADS), groups), THREADS, 0,
                       device_stream()>>>((float *)stats.data, partial, blocks, width);
    LAUNCH_CHECK();
}

/* Each thread sums a column of stats. The last thread adds the products of counts and sums of p, in
 * the order of groups and experts. */
__global__ static void sum_kernel(float *sums, const float *stats, int groups, int experts,
                                  float factor)
{
    const int width = 2 * experts + 2, i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    float sum = 0;
    if (i > width)
        return;
    for (int g = 0; g < groups; g++) {
        const float *row = stats + (size_t)g * width;
        if (i < width)
            sum += row[i];
        for (int e = 0; e < experts && i == width; e++)
            sum += row[e] * row[experts + e];
    }
    sums[i] += i < width ? sum : factor * sum;
}

void backend_router_sum(Tensor sums, Tensor stats, int experts, float factor)
{
    check_router_sum(sums, stats, experts);
    const int count = router_stats_width(experts) + 1;
    sum_kernel<<<(unsigned)ceil_div(count, THREADS), THREADS, 0, device_stream()>>>(
        (float *)sums.data, (const float *)stats.data, stats.rows, experts, factor);
    LAUNCH_CHECK();
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adds the gradient of the weights to g, the gradient with respect to p. */
__device__ static void add_weight_gradient(float (&g)[EACH], const TokenSoftmax &t,
                                           const float *dweight, const Routing &r, int n,
                                           bool normalize)
{
    const int lane = threadIdx.x % 32, K = r.top_k;
    const size_t at = (size_t)n * K + lane;
    const int expert = lane < K ? r.expert[at] : -1;
    const float d = lane < K ? dweight[r.row[at]] : 0.0f;
    float chosen[EACH] = {}, sum = 0, product = 0; /* chosen: dweight of the lane's experts */
    bool is_chosen[EACH] = {};
    for (int j = 0; j < K; j++) {
        const int e = __shfl_sync(0xffffffffu, expert, j);
        const float of = __shfl_sync(0xffffffffu, d, j);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i == e)
                chosen[i] = of, is_chosen[i] = true;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (is_chosen[i])
            sum += t.p[i], product += t.p[i] * chosen[i];
    sum = warp_sum(sum);
    product = warp_sum(product);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (is_chosen[i])
            g[i] += normalize ? (chosen[i] - product / sum) / sum : chosen[i];
}

/* If p = softmax(x) has the gradient g, x has the gradient p (g - sum of p g). counts: rows of
 * `width` floats, one row for each group of `tokens` tokens. */
__global__ __launch_bounds__(THREADS) void route_backward_kernel(
    AnyOut dlogits, const float *dweight, const float *logits, Routing r, bool normalize,
    const float *counts, int width, int tokens, float balance, float z)
{
    const int n = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, E = r.experts;
    if (n >= r.tokens)
        return;
    const TokenSoftmax t = softmax_of(logits + (size_t)n * E, E);
    float g[EACH] = {}, mean = 0;
    if (counts)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i < E)
                g[i] = balance * counts[(size_t)(n / tokens) * width + lane + 32 * i];
    add_weight_gradient(g, t, dweight, r, n, normalize);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        mean += t.p[i] * g[i];
    mean = warp_sum(mean) - 2 * z * t.z;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < E) {
            const size_t at = (size_t)n * E + lane + 32 * i;
            const float d = t.p[i] * (g[i] - mean);
            if (dlogits.is_f32)
                ((float *)dlogits.data)[at] = d;
            else
                ((bf16 *)dlogits.data)[at] = from_float<bf16>(d);
        }
}

void backend_route_backward(Tensor dlogits, const float *dweight, Tensor logits, Routing r,
                            bool normalize, Tensor counts, float balance, float z)
{
    check_route_backward(dlogits, dweight, logits, r, counts, balance);
    check_sizes(OPERATION, r);
    const int tokens = counts.data ? r.tokens / counts.rows : r.tokens;
    route_backward_kernel<<<(unsigned)ceil_div(r.tokens, WARPS), THREADS, 0, device_stream()>>>(
        any_out(dlogits), dweight, (const float *)logits.data, r, normalize,
        (const float *)counts.data, counts.cols, tokens, balance, z);
    LAUNCH_CHECK();
}
