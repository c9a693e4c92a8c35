/* Attention in F32 arithmetic for F32 or BF16 rows, any head width up to 256, documents included: what verifies
 * cuDNN's attention and serves where cuDNN has none. The equations are in kernels/cpu/attention.c. Simple before
 * fast: no tensor cores; scores are computed again in backward, never stored. Always the same order of summation.
 *
 * Threads: a block owns 32 rows of one head (queries in forward and for dq, keys for dk and dv), four per warp, and
 * walks over the rows of the other side in tiles of 32 in shared memory, as far as its documents and windows reach. For
 * scores a lane is a row of the tile; for sums over the tile a lane holds elements lane, lane + 32, ... of the head.
 * Rows in shared memory are D + 1 floats apart, so that lanes that read one column meet 32 banks.
 *
 * DIFFERS from kernels/cpu/attention.c in rounding only: softmax over tiles with a running maximum [Milakov &
 * Gimelshein 2018], sums in another order. */
#include "kernels/cuda/cuda.h"

static constexpr int TILE = 32, WARPS = 8, THREADS = 32 * WARPS, OWN = TILE / WARPS;

/* q, k, v of a head are columns of the rows of qkv; y and dy have rows of their own. */
struct Shape {
    int N, T, H, K, D;
    int qkv_width, y_width;
    float scale;
    int window;                 /* T: none */
    int count;                  /* documents; 0: every sequence is one */
    const int *start;
};

/* Where the document that token n belongs to begins (step 0) or ends (step 1). */
__device__ static int document_edge(const Shape &s, int n, int step)
{
    if (s.count == 0)
        return (n / s.T + step) * s.T;
    int low = 0, high = s.count;            /* start[low] <= n < start[high] */
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (s.start[middle] <= n)
            low = middle;
        else
            high = middle;
    }
    return s.start[low + step];
}

/* The first token that token n sees. */
__device__ static int first_key(const Shape &s, int n)
{
    return max(document_edge(s, n, 0), n - s.window + 1);
}

__device__ static size_t lse_at(const Shape &s, int n, int h)
{
    return ((size_t)(n / s.T) * s.H + h) * s.T + n % s.T;
}

/* Rows first .. first + 31 of a head's D columns; zeros behind row N. */
template <typename T>
__device__ static void load_tile(float *tile, const T *columns, size_t width, int first, const Shape &s)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp; r < TILE; r += WARPS)
        for (int d = lane; d < s.D; d += 32)
            tile[r * (s.D + 1) + d] = first + r < s.N ? to_float(columns[(first + r) * width + d]) : 0.0f;
}

__device__ static float dot(const float *a, const float *b, int D)
{
    float sum = 0;
    for (int d = 0; d < D; d++)
        sum += a[d] * b[d];
    return sum;
}

/* sum += weight[j] * row j of the tile, over the tile; lane j holds weight[j]. */
template <int C> __device__ static void add_rows(float (&sum)[C], float weight, const float *tile, int D)
{
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < TILE; j++) {
        float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
        for (int c = 0; c < C; c++)
            if (lane + 32 * c < D)
                sum[c] += w * tile[j * (D + 1) + lane + 32 * c];
    }
}

template <typename T, int C> __device__ static void store_row(T *row, const float (&x)[C], float factor, int D)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < C; c++)
        if (lane + 32 * c < D)
            row[lane + 32 * c] = from_float<T>(x[c] * factor);
}

template <typename T, int C>
__global__ void __launch_bounds__(THREADS) forward_kernel(T *y, float *lse, const T *qkv, Shape s)
{
    extern __shared__ float shared[];
    float *queries = shared, *keys = queries + TILE * (s.D + 1), *values = keys + TILE * (s.D + 1);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int h = blockIdx.y, kv = h / (s.H / s.K), first = blockIdx.x * TILE, row = first + warp * OWN;
    float top[OWN], sum[OWN], out[OWN][C] = {};
    int begin[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        top[i] = -INFINITY;
        sum[i] = 0;
        begin[i] = row + i < s.N ? first_key(s, row + i) : s.N;
    }
    load_tile(queries, qkv + h * s.D, s.qkv_width, first, s);

    for (int tile = first_key(s, first); tile < min(first + TILE, s.N); tile += TILE) {
        __syncthreads();
        load_tile(keys, qkv + (s.H + kv) * s.D, s.qkv_width, tile, s);
        load_tile(values, qkv + (s.H + s.K + kv) * s.D, s.qkv_width, tile, s);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool seen = tile + lane >= begin[i] && tile + lane <= row + i;
            float score = seen ? s.scale * dot(queries + (warp * OWN + i) * (s.D + 1), keys + lane * (s.D + 1), s.D)
                               : -INFINITY;
            float newtop = fmaxf(top[i], warp_max(score));
            if (newtop == -INFINITY)
                continue;                   /* no key of this tile is seen, nor was any before: exp would give NaN */
            float p = expf(score - newtop), shrink = expf(top[i] - newtop);
            top[i] = newtop;
            sum[i] = sum[i] * shrink + warp_sum(p);
#pragma unroll
            for (int c = 0; c < C; c++)
                out[i][c] *= shrink;
            add_rows<C>(out[i], p, values, s.D);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (row + i >= s.N)
            break;
        store_row<T, C>(y + (size_t)(row + i) * s.y_width + h * s.D, out[i], 1 / sum[i], s.D);
        if (lane == 0)
            lse[lse_at(s, row + i, h)] = top[i] + logf(sum[i]);
    }
}

/* dq, and delta = dy . y (H, N) for dkv_kernel. */
template <typename T, int C>
__global__ void __launch_bounds__(THREADS) dq_kernel(T *dqkv, float *delta, const T *dy, const T *qkv, const T *y,
                                                     const float *lse, Shape s)
{
    extern __shared__ float shared[];
    const int size = TILE * (s.D + 1), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *queries = shared, *grads = queries + size, *keys = grads + size, *values = keys + size;
    const int h = blockIdx.y, kv = h / (s.H / s.K), first = blockIdx.x * TILE, row = first + warp * OWN;
    load_tile(queries, qkv + h * s.D, s.qkv_width, first, s);
    load_tile(grads, dy + h * s.D, s.y_width, first, s);
    __syncthreads();

    float dot_dy_y[OWN], row_lse[OWN], dq[OWN][C] = {};
    int begin[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int n = row + i;
        dot_dy_y[i] = row_lse[i] = 0;
        begin[i] = s.N;
        if (n >= s.N)
            continue;
        for (int d = lane; d < s.D; d += 32)
            dot_dy_y[i] += grads[(n - first) * (s.D + 1) + d] * to_float(y[(size_t)n * s.y_width + h * s.D + d]);
        dot_dy_y[i] = warp_sum(dot_dy_y[i]);
        row_lse[i] = lse[lse_at(s, n, h)];
        begin[i] = first_key(s, n);
        if (lane == 0)
            delta[(size_t)h * s.N + n] = dot_dy_y[i];
    }
    for (int tile = first_key(s, first); tile < min(first + TILE, s.N); tile += TILE) {
        __syncthreads();
        load_tile(keys, qkv + (s.H + kv) * s.D, s.qkv_width, tile, s);
        load_tile(values, qkv + (s.H + s.K + kv) * s.D, s.qkv_width, tile, s);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = (warp * OWN + i) * (s.D + 1);
            float ds = 0;
            if (tile + lane >= begin[i] && tile + lane <= row + i) {
                float p = expf(s.scale * dot(queries + at, keys + lane * (s.D + 1), s.D) - row_lse[i]);
                ds = p * (dot(grads + at, values + lane * (s.D + 1), s.D) - dot_dy_y[i]);
            }
            add_rows<C>(dq[i], ds, keys, s.D);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (row + i < s.N)
            store_row<T, C>(dqkv + (size_t)(row + i) * s.qkv_width + h * s.D, dq[i], s.scale, s.D);
}

/* dk and dv of a key/value head, summed over the query heads that read it, in their order. */
template <typename T, int C>
__global__ void __launch_bounds__(THREADS) dkv_kernel(T *dqkv, const float *delta, const T *dy, const T *qkv,
                                                      const float *lse, Shape s)
{
    extern __shared__ float shared[];
    const int size = TILE * (s.D + 1), lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = s.H / s.K;
    float *queries = shared, *grads = queries + size, *keys = grads + size, *values = keys + size;
    const int kv = blockIdx.y, first = blockIdx.x * TILE, row = first + warp * OWN;
    const int last = min(first + TILE, s.N) - 1, end = min(document_edge(s, last, 1), last + s.window);
    float dk[OWN][C] = {}, dv[OWN][C] = {};
    load_tile(keys, qkv + (s.H + kv) * s.D, s.qkv_width, first, s);
    load_tile(values, qkv + (s.H + s.K + kv) * s.D, s.qkv_width, first, s);

    for (int h = kv * group; h < (kv + 1) * group; h++) {
        for (int tile = first; tile < end; tile += TILE) {
            __syncthreads();
            load_tile(queries, qkv + h * s.D, s.qkv_width, tile, s);
            load_tile(grads, dy + h * s.D, s.y_width, tile, s);
            __syncthreads();
            const int n = tile + lane;
            const int begin = n < s.N ? first_key(s, n) : s.N;
            const float row_lse = n < s.N ? lse[lse_at(s, n, h)] : 0;
            const float row_delta = n < s.N ? delta[(size_t)h * s.N + n] : 0;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int at = (warp * OWN + i) * (s.D + 1);
                float p = 0, ds = 0;
                if (row + i >= begin && row + i <= n) {
                    p = expf(s.scale * dot(queries + lane * (s.D + 1), keys + at, s.D) - row_lse);
                    ds = p * (dot(grads + lane * (s.D + 1), values + at, s.D) - row_delta);
                }
                add_rows<C>(dv[i], p, grads, s.D);
                add_rows<C>(dk[i], ds, queries, s.D);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (row + i >= s.N)
            break;
        T *out = dqkv + (size_t)(row + i) * s.qkv_width + (s.H + kv) * s.D;
        store_row<T, C>(out, dk[i], s.scale, s.D);
        store_row<T, C>(out + s.K * s.D, dv[i], 1, s.D);
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------- */

struct Tensors {
    Tensor y, qkv, dy, dqkv;        /* of forward: y, qkv */
    float *lse, *delta;
};

static size_t tile_bytes(const Shape &s, int tiles)
{
    return tiles * TILE * (s.D + 1) * sizeof(float);
}

/* More than 48 KiB of shared memory must be asked for; compute capabilities 8.6, 8.9 and 12.0 have 99 KiB, which backward
 * needs from D = 198 on. */
template <typename Kernel> static void allow_shared(Kernel *kernel, size_t bytes, int D)
{
    const cudaError_t status =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (status == cudaErrorInvalidValue)
        die("attention: heads of width %d need %zu KiB of shared memory in a block, more than this %s has", D,
            ceil_div(bytes, 1024), device_name());
    cuda_check(status, "cudaFuncSetAttribute", __FILE__, __LINE__);
}

template <typename T, int C> static void launch_forward(const Tensors &t, const Shape &s)
{
    const size_t bytes = tile_bytes(s, 3);
    allow_shared(forward_kernel<T, C>, bytes, s.D);
    forward_kernel<T, C><<<dim3(ceil_div(s.N, TILE), s.H), THREADS, bytes, device_stream()>>>(
        (T *)t.y.data, t.lse, (const T *)t.qkv.data, s);
    LAUNCH_CHECK();
}

template <typename T, int C> static void launch_backward(const Tensors &t, const Shape &s)
{
    const size_t bytes = tile_bytes(s, 4);
    allow_shared(dq_kernel<T, C>, bytes, s.D);
    dq_kernel<T, C><<<dim3(ceil_div(s.N, TILE), s.H), THREADS, bytes, device_stream()>>>(
        (T *)t.dqkv.data, t.delta, (const T *)t.dy.data, (const T *)t.qkv.data, (const T *)t.y.data, t.lse, s);
    LAUNCH_CHECK();
    allow_shared(dkv_kernel<T, C>, bytes, s.D);
    dkv_kernel<T, C><<<dim3(ceil_div(s.N, TILE), s.K), THREADS, bytes, device_stream()>>>(
        (T *)t.dqkv.data, t.delta, (const T *)t.dy.data, (const T *)t.qkv.data, t.lse, s);
    LAUNCH_CHECK();
}

/* C: a lane holds elements lane, lane + 32, ... lane + 32 (C-1). */
template <typename T, int C> static void launch(const Tensors &t, const Shape &s)
{
    if (t.dqkv.data)
        launch_backward<T, C>(t, s);
    else
        launch_forward<T, C>(t, s);
}

template <typename T> static void launch_width(const Tensors &t, const Shape &s)
{
    if (s.D <= 32)
        launch<T, 1>(t, s);
    else if (s.D <= 64)
        launch<T, 2>(t, s);
    else if (s.D <= 128)
        launch<T, 4>(t, s);
    else if (s.D <= 256)
        launch<T, 8>(t, s);
    else
        die("attention: head width %d; there are kernels up to 256", s.D);
}

static void launch_format(const Tensors &t, Attention a, Documents docs)
{
    Shape s = { a.B * a.T, a.T, a.H, a.K, a.D, (a.H + 2 * a.K) * a.D, a.H * a.D, a.scale,
                a.window > 0 ? a.window : a.T, docs.count, docs.start };
    const DType d = t.qkv.format.dtype;
    if (t.y.format.dtype != d || format_has_scales(t.qkv.format))
        die("attention: qkv is %s and y is %s; both must be f32 or both bf16", format_name(t.qkv.format),
            format_name(t.y.format));
    if (d == F32)
        launch_width<float>(t, s);
    else
        launch_width<bf16>(t, s);
}

void attention_plain_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    launch_format({ y, qkv, {}, {}, lse, NULL }, a, docs);
}

void attention_plain_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a,
                              Documents docs)
{
    float *delta = (float *)device_scratch((size_t)a.B * a.T * a.H * sizeof(float), SCRATCH_ATTENTION);
    launch_format({ y, qkv, dy, dqkv, (float *)lse, delta }, a, docs);
}
