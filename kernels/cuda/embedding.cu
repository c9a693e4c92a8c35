/* Rows of the embedding table.
 *
 * Forward: one block per token; 4 bytes per element in BF16 (w, y).
 * Backward: positions are sorted by token (sort_kernel), then the rows of equal tokens are added, in F32 and in
 * their order, to the row of dw, which is read and written once (add_rows_kernel). Bytes per element in BF16: 2 of
 * dy and 4 for every different token. No atomics on floats: the same bits every time, those of the CPU. */
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/vector.cuh"

enum { PACKS = 4, MAX_THREADS = 256 };

/* As store_any, but out of the L2 cache first: y is many times its size, and rows of w are read again. */
template <bool ALIGNED, typename T> __device__ static inline void store_once(T *p, const float (&x)[8], int left)
{
    if (!ALIGNED) {
        store_pack<ALIGNED>(p, x, left);
        return;
    }
    const Pack<T> pack = make_pack(x, T());
    if (left > 0)
#pragma unroll
        for (size_t k = 0; k < sizeof(T) / 2; k++)
            __stcs(reinterpret_cast<uint4 *>(p) + k, make_uint4(pack.word[4 * k], pack.word[4 * k + 1],
                                                                pack.word[4 * k + 2], pack.word[4 * k + 3]));
}

template <bool ALIGNED, typename T> __global__ __launch_bounds__(MAX_THREADS)
void embedding_forward_kernel(AnyOut y, const int *tokens, const T *w, int C)
{
    const T *from = w + (size_t)tokens[blockIdx.x] * C;
    for (int first = 8 * threadIdx.x; first < C; first += 8 * PACKS * blockDim.x) {
        Pack<T> pack[PACKS];
#pragma unroll
        for (int j = 0; j < PACKS; j++)
            pack[j] = load_pack<ALIGNED>(from + first + 8 * j * blockDim.x, C - first - 8 * j * (int)blockDim.x);
#pragma unroll
        for (int j = 0; j < PACKS; j++) {
            const int c = first + 8 * j * blockDim.x;
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = pack[j][i];
            if (y.is_f32)
                store_once<ALIGNED>((float *)y.data + (size_t)blockIdx.x * C + c, x, C - c);
            else
                store_once<ALIGNED>((bf16 *)y.data + (size_t)blockIdx.x * C + c, x, C - c);
        }
    }
}

void embedding_forward(Tensor y, const int *tokens, Tensor w)
{
    const int N = y.rows, C = w.cols;
    CHECK_DENSE(w, w.rows, C);
    CHECK_DENSE(y, N, C);
    if (N == 0)
        return;
    with_bool(is_aligned(y, C) && is_aligned(w, C), [&](auto aligned) {
        with_type(w, [&](auto *table) {
            const int threads = block_threads((int)ceil_div(C, 8), PACKS, MAX_THREADS);
            embedding_forward_kernel<decltype(aligned)::value><<<N, threads, 0, device_stream()>>>(any_out(y), tokens,
                                                                                                  table, C);
        });
    });
    LAUNCH_CHECK();
}

/* ---- backward: sort ------------------------------------------------------------------------------------------- */

enum { SORT_WARPS = 16, SORT_THREADS = 32 * SORT_WARPS, BUCKET_SIZE = SORT_THREADS, BATCH = 8 };

/* sorted: (token, position), equal tokens side by side and in the order of their positions.
 *
 * A counting sort in one launch. Block b has bucket b: the tokens t with t % 2^bits = b, at most BUCKET_SIZE
 * different ones. They lie behind those of the buckets before, which the block counts too, so that no block waits
 * for another: each reads all of `tokens`, twice, mostly from L1. A warp has a segment of the positions and, for
 * each token of the bucket, the place of the next one that it finds. */
__global__ __launch_bounds__(SORT_THREADS)
void sort_kernel(int2 *sorted, const int *tokens, int N, int bits)
{
    using Scan = cub::BlockScan<int, SORT_THREADS>;
    __shared__ typename Scan::TempStorage storage;
    __shared__ int place[SORT_WARPS][BUCKET_SIZE], before;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bucket = blockIdx.x, mask = (1 << bits) - 1;
    const int segment = (N + SORT_THREADS - 1) / SORT_THREADS * 32, begin = warp * segment;
    const int end = min(N, begin + segment);
    for (int w = 0; w < SORT_WARPS; w++)
        place[w][threadIdx.x] = 0;
    if (threadIdx.x == 0)
        before = 0;
    __syncthreads();

    int smaller = 0;
    for (int base = begin; base < end; base += 32 * BATCH) {
        int t[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            t[j] = base + 32 * j + lane < end ? tokens[base + 32 * j + lane] : -1;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            smaller += (t[j] & mask) < bucket;          /* not so for -1 */
            if (t[j] >= 0 && (t[j] & mask) == bucket)
                atomicAdd(&place[warp][t[j] >> bits], 1);
        }
    }
    smaller = __reduce_add_sync(0xffffffffu, smaller);
    if (lane == 0)
        atomicAdd(&before, smaller);
    __syncthreads();

    int count = 0, at;                                  /* of this thread's token: counts become places */
    for (int w = 0; w < SORT_WARPS; w++)
        count += place[w][threadIdx.x];
    Scan(storage).ExclusiveSum(count, at);
    at += before;
    for (int w = 0; w < SORT_WARPS; w++) {
        count = place[w][threadIdx.x];
        place[w][threadIdx.x] = at;
        at += count;
    }
    __syncthreads();

    for (int base = begin; base < end; base += 32 * BATCH) {
        int t[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            t[j] = base + 32 * j + lane < end ? tokens[base + 32 * j + lane] : -1;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const bool ours = t[j] >= 0 && (t[j] & mask) == bucket;
            const unsigned all = __ballot_sync(0xffffffffu, ours);
            if (ours) {
                const unsigned same = __match_any_sync(all, t[j]);
                const int leader = __ffs(same) - 1;
                int *next = &place[warp][t[j] >> bits], to = 0;
                if (lane == leader) {
                    to = *next;
                    *next = to + __popc(same);
                }
                to = __shfl_sync(same, to, leader) + __popc(same & ((1u << lane) - 1));
                sorted[to] = make_int2(t[j], base + 32 * j + lane);
            }
            __syncwarp();
        }
    }
}

/* In scratch memory. */
static const int2 *sort_by_token(const int *tokens, int N, int V)
{
    int2 *sorted = (int2 *)device_scratch((size_t)N * sizeof *sorted, SCRATCH_0);
    int bits = 8;                       /* two blocks per SM of a GPU of today; each reads all tokens */
    while (ceil_div(V, (size_t)1 << bits) > BUCKET_SIZE)
        bits++;
    sort_kernel<<<1 << bits, SORT_THREADS, 0, device_stream()>>>(sorted, tokens, N, bits);
    LAUNCH_CHECK();
    return sorted;
}

/* ---- backward: sum -------------------------------------------------------------------------------------------- */

enum { ROWS = 8, SUM_THREADS = 128 };

/* The rest of a long run, from entry n on: sum += the rows of dy whose token is t, one by one. c: the thread's
 * column. A frequent token is a long chain of sums, which would wait for memory: rows come to L2 32 ahead. */
template <bool ALIGNED, typename T>
__device__ static inline void add_run(float (&sum)[8], const int2 *sorted, const T *dy, int n, int t, int c, int N,
                                      int C)
{
    constexpr int EACH = 32 / sizeof(T);                /* rows in flight */
    const int lane = threadIdx.x % 32, first = c - 8 * lane;
    const int2 none = { -1, 0 };
    int2 now = n + lane < N ? sorted[n + lane] : none, next = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
    for (;;) {
        const int count = __popc(__ballot_sync(0xffffffffu, now.x == t));
        if (next.x == t)
#pragma unroll
            for (int k = 0; k < 256; k += 128 / sizeof(T))
                if (first + k < C)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(dy + (size_t)next.y * C + first + k));
        n += 32;
        const int2 later = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
        for (int from = 0; from < count; from += EACH) {
            Pack<T> row[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const size_t position = __shfl_sync(0xffffffffu, now.y, from + k);
                row[k] = load_pack<ALIGNED>(dy + position * C + c, from + k < count ? C - c : 0);
            }
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (from + k < count)
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        sum[i] += row[k][i];
        }
        if (count < 32)
            return;
        now = next, next = later;
    }
}

/* A block has ROWS entries of `sorted` and SUM_THREADS packs of columns: the runs of equal tokens that begin there,
 * the last of which may go on behind. All loads of those entries are in flight at once. */
template <bool ALIGNED, typename TDW, typename TDY> __global__ __launch_bounds__(SUM_THREADS)
void add_rows_kernel(TDW *dw, const int2 *sorted, const TDY *dy, int N, int C, int slices)
{
    const int first = blockIdx.x / slices * ROWS, c = 8 * (blockIdx.x % slices * blockDim.x + threadIdx.x);
    const int left = C - c;
    int2 entry[ROWS + 1];
#pragma unroll
    for (int k = 0; k <= ROWS; k++)
        entry[k] = first + k < N ? sorted[first + k] : make_int2(-1, 0);
    int token = first > 0 ? sorted[first - 1].x : -1;
    bool begins[ROWS], ours[ROWS], some = false;
    Pack<TDW> before[ROWS];
    Pack<TDY> row[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        begins[k] = entry[k].x >= 0 && entry[k].x != token;
        token = entry[k].x;
        some |= begins[k];
        ours[k] = some && token >= 0;
        before[k] = load_pack<ALIGNED>((const TDW *)dw + (size_t)entry[k].x * C + c, begins[k] ? left : 0);
        row[k] = load_pack<ALIGNED>(dy + (size_t)entry[k].y * C + c, ours[k] ? left : 0);
    }
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = (begins[k] ? before[k][i] : sum[i]) + row[k][i];
        if (ours[k] && entry[k + 1].x != entry[k].x)
            store_pack<ALIGNED>(dw + (size_t)entry[k].x * C + c, sum, left);
    }
    if (!ours[ROWS - 1] || entry[ROWS].x != token)
        return;
    add_run<ALIGNED>(sum, sorted, dy, first + ROWS, token, c, N, C);
    store_pack<ALIGNED>(dw + (size_t)token * C + c, sum, left);
}

void embedding_backward(Tensor dw, const int *tokens, Tensor dy)
{
    const int N = dy.rows, C = dw.cols;
    CHECK_DENSE(dw, dw.rows, C);
    CHECK_DENSE(dy, N, C);
    if (N == 0)
        return;
    const int2 *sorted = sort_by_token(tokens, N, dw.rows);
    const int threads = block_threads((int)ceil_div(C, 8), 1, SUM_THREADS), slices = (int)ceil_div(C, 8 * threads);
    const unsigned blocks = (unsigned)(ceil_div(N, ROWS) * slices);
    with_bool(is_aligned(dw, C) && is_aligned(dy, C), [&](auto aligned) {
        with_type(dw, [&](auto *out) {
            with_type(dy, [&](auto *in) {
                add_rows_kernel<decltype(aligned)::value><<<blocks, threads, 0, device_stream()>>>(out, sorted, in, N,
                                                                                                   C, slices);
            });
        });
    });
    LAUNCH_CHECK();
}
