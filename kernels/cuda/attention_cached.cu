/* Attention of a sequence's next tokens over a cache, in F32 arithmetic. The equations are in
 * kernels/cpu/attention.c.
 *
 * A single token would give one block per head, too few for the GPU. So the keys are divided into
 * splits. A block processes one split for one head of one token, and stores the split's maximum,
 * sum and weighted values. A second kernel combines the splits [Dao et al. 2023, Flash-Decoding].
 * The number of splits depends only on the shape, and all sums have one order, so the bits are
 * always the same. The tokens of a prompt give enough blocks; each token's blocks read the keys
 * from the L2 cache.
 *
 * A warp takes KEYS keys at a time; a lane holds elements lane, lane + 32, ... of the head. The
 * kernel reads keys and values once per query head of their group. Only the first of these reads is
 * from memory. */
#include "kernels/cuda/cuda.h"

static constexpr int KEYS = 8, WARPS = 4, THREADS = 32 * WARPS;
/* the number of splits gives about BLOCKS blocks, and a split has at least LEAST_KEYS keys */
static constexpr int BLOCKS = 1024, LEAST_KEYS = 64;

struct Shape {
    int H, K, D, qkv_width, kv_width;
    float scale;
    int past, window; /* window exceeds any distance if attention has no window */
    int splits;
};

/* A range of keys. split_of returns split number `split` of the keys that token t sees. */
struct Range {
    int from, to;
};

__device__ static Range split_of(const Shape &s, int t, int split)
{
    const int last = s.past + t, first = last >= s.window ? last - s.window + 1 : 0;
    const int each = (last - first) / s.splits + 1, from = first + split * each;
    return { from, min(from + each, last + 1) };
}

/* The result of one split of the keys: the largest score, the sum of the weights exp(score -
 * largest), and the D sums of the values times these weights. */
__device__ static float *split_at(float *splits, const Shape &s, int t, int h, int split)
{
    return splits + (((size_t)t * s.H + h) * s.splits + split) * (s.D + 2);
}

template <typename T>
__global__ void append_kernel(T *k, T *v, const T *qkv, Shape s)
{
    const T *row = qkv + (size_t)blockIdx.x * s.qkv_width + s.H * s.D;
    const size_t to = (size_t)(s.past + (int)blockIdx.x) * s.kv_width;
    for (int i = threadIdx.x; i < s.kv_width; i += blockDim.x) {
        k[to + i] = row[i];
        v[to + i] = row[s.kv_width + i];
    }
}

/* Loads rows first .. first + KEYS - 1 of a head. Rows from `end` on become zeros. */
template <typename T, int C>
__device__ static void load_rows(float (&x)[KEYS][C], const T *columns, int width, int first,
                                 int end, int D)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS; j++)
#pragma unroll
        for (int c = 0; c < C; c++)
            x[j][c] = first + j < end && lane + 32 * c < D
                          ? to_float(columns[(size_t)(first + j) * width + lane + 32 * c])
                          : 0.0f;
}

/* Combines the results of the warps, in the order of the warps. Each warp's result is a row of
 * `shared` (D + 2). */
__device__ static void merge_warps(float *to, const float *shared, int D)
{
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < WARPS; w++)
        top = fmaxf(top, shared[w * (D + 2)]);
    for (int w = 0; w < WARPS; w++)
        sum += top == -INFINITY ? 0.0f : shared[w * (D + 2) + 1] * expf(shared[w * (D + 2)] - top);
    for (int d = threadIdx.x; d < D; d += THREADS) {
        float weighted = 0;
        for (int w = 0; w < WARPS; w++)
            weighted += top == -INFINITY
                            ? 0.0f
                            : shared[w * (D + 2) + 2 + d] * expf(shared[w * (D + 2)] - top);
        to[2 + d] = weighted;
    }
    if (threadIdx.x == 0) {
        to[0] = top;
        to[1] = sum;
    }
}

template <typename T, int C>
__global__ void __launch_bounds__(THREADS)
    split_kernel(float *splits, const T *qkv, const T *k, const T *v, Shape s)
{
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.x % s.H, t = blockIdx.x / s.H, kv = h / (s.H / s.K);
    const Range keys = split_of(s, t, blockIdx.y);
    const T *query = qkv + (size_t)t * s.qkv_width + h * s.D;
    float q[C], out[C] = {}, top = -INFINITY, sum = 0;
#pragma unroll
    for (int c = 0; c < C; c++)
        q[c] = lane + 32 * c < s.D ? to_float(query[lane + 32 * c]) : 0.0f;

    for (int first = keys.from + warp * KEYS; first < keys.to; first += WARPS * KEYS) {
        float rows[KEYS][C], score[KEYS], best = top;
        load_rows<T, C>(rows, k + kv * s.D, s.kv_width, first, keys.to, s.D);
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            float dot = 0;
#pragma unroll
            for (int c = 0; c < C; c++)
                dot += q[c] * rows[j][c];
            score[j] = first + j < keys.to ? s.scale * warp_sum(dot) : -INFINITY;
            best = fmaxf(best, score[j]);
        }
        load_rows<T, C>(rows, v + kv * s.D, s.kv_width, first, keys.to, s.D);
        const float shrink = expf(top - best);
        top = best;
        sum *= shrink;
#pragma unroll
        for (int c = 0; c < C; c++)
            out[c] *= shrink;
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            const float p = expf(score[j] - top);
            sum += p;
#pragma unroll
            for (int c = 0; c < C; c++)
                out[c] += p * rows[j][c];
        }
    }
    float *own = shared + warp * (s.D + 2);
    if (lane == 0) {
        own[0] = top;
        own[1] = sum;
    }
#pragma unroll
    for (int c = 0; c < C; c++)
        if (lane + 32 * c < s.D)
            own[2 + lane + 32 * c] = out[c];
    __syncthreads();
    merge_warps(split_at(splits, s, t, h, blockIdx.y), shared, s.D);
}

/* For a split without keys the kernel stores -infinity as maximum, and zeros. */
template <typename T>
__global__ void merge_kernel(T *y, float *splits, Shape s)
{
    const int h = blockIdx.x % s.H, t = blockIdx.x / s.H;
    const float *split = split_at(splits, s, t, h, 0);
    float top = -INFINITY, sum = 0;
    for (int i = 0; i < s.splits; i++)
        top = fmaxf(top, split[i * (s.D + 2)]);
    for (int i = 0; i < s.splits; i++)
        sum += split[i * (s.D + 2) + 1] * expf(split[i * (s.D + 2)] - top);
    for (int d = threadIdx.x; d < s.D; d += blockDim.x) {
        float weighted = 0;
        for (int i = 0; i < s.splits; i++)
            weighted += split[i * (s.D + 2) + 2 + d] * expf(split[i * (s.D + 2)] - top);
        y[((size_t)t * s.H + h) * s.D + d] = from_float<T>(weighted / sum);
    }
}

template <typename T, int C>
static void launch(Tensor y, Tensor qkv, KvCache cache, const Shape &s, int tokens)
{
    /* Scratch memory for the largest number of splits, so that its size does not grow from token to
     * token. */
    const size_t heads = (size_t)tokens * s.H, most = heads > BLOCKS ? heads : BLOCKS;
    float *splits =
        (float *)device_scratch(most * (s.D + 2) * sizeof(float), SCRATCH_ATTENTION_OWN);
    T *k = (T *)cache.k.data, *v = (T *)cache.v.data;
    const T *in = (const T *)qkv.data;
    append_kernel<T><<<tokens, 256, 0, device_stream()>>>(k, v, in, s);
    LAUNCH_CHECK();
    split_kernel<T, C><<<dim3((unsigned)heads, s.splits), THREADS, WARPS *(s.D + 2) * sizeof(float),
                         device_stream()>>>(splits, in, k, v, s);
    LAUNCH_CHECK();
    merge_kernel<T><<<(unsigned)heads, 128, 0, device_stream()>>>((T *)y.data, splits, s);
    LAUNCH_CHECK();
}

template <typename T>
static void launch_width(Tensor y, Tensor qkv, KvCache cache, const Shape &s, int tokens)
{
    if (s.D <= 32)
        launch<T, 1>(y, qkv, cache, s, tokens);
    else if (s.D <= 64)
        launch<T, 2>(y, qkv, cache, s, tokens);
    else if (s.D <= 128)
        launch<T, 4>(y, qkv, cache, s, tokens);
    else if (s.D <= 256)
        launch<T, 8>(y, qkv, cache, s, tokens);
    else
        die("attention_cached: head width %d; there are kernels up to 256", s.D);
}

void backend_attention_cached(Tensor y, Tensor qkv, KvCache cache, Attention a)
{
    check_cached(OPERATION, y, qkv, cache, a);
    const int keys = cache.length + a.T, seen = a.window && a.window < keys ? a.window : keys;
    const int useful = (int)ceil_div(seen, LEAST_KEYS), wanted = BLOCKS / (a.T * a.H);
    const Shape s = { a.H,
                      a.K,
                      a.D,
                      qkv.cols,
                      a.K * a.D,
                      a.scale,
                      cache.length,
                      a.window ? a.window : keys,
                      wanted < 1        ? 1
                      : wanted < useful ? wanted
                                        : useful };
    if (qkv.format.dtype == F32)
        launch_width<float>(y, qkv, cache, s, a.T);
    else
        launch_width<bf16>(y, qkv, cache, s, a.T);
}
