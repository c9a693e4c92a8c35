/* Rows of the embedding table.
 *
 * Forward: one block per token; 4 bytes per element in BF16 (w, y).
 * Backward: the rows of equal tokens, which come sorted, are added, in F32 and in their order, to the row of dw, which is
 * read and written once. Bytes per element in BF16: 2 of dy and 4 for every different token. No atomics on floats: the
 * same bits every time, those of the CPU. */
#include "kernels/cuda/vector.cuh"

enum { PACKS = 4, MAX_THREADS = 256 };

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
            store_any<ALIGNED>(y, (size_t)blockIdx.x * C + c, x, C - c);
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

/* ---- backward -------------------------------------------------------------------------------------------------- */

enum { ROWS = 8, SUM_THREADS = 128 };

/* The rest of a long run, from entry n on: sum += the rows of dy whose token is t, one by one. c: the thread's
 * column. A frequent token is a long chain of sums, which would wait for memory: rows come to L2 32 ahead. */
template <bool ALIGNED, typename T>
__device__ static inline void add_run(float (&sum)[8], const TokenAt *sorted, const T *dy, int n, int t, int c, int N,
                                      int C)
{
    constexpr int EACH = 32 / sizeof(T);                /* rows in flight */
    const int lane = threadIdx.x % 32, first = c - 8 * lane;
    const TokenAt none = { -1, 0 };
    TokenAt now = n + lane < N ? sorted[n + lane] : none, next = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
    for (;;) {
        const int count = __popc(__ballot_sync(0xffffffffu, now.token == t));
        if (next.token == t)
#pragma unroll
            for (int k = 0; k < 256; k += 128 / sizeof(T))
                if (first + k < C)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(dy + (size_t)next.position * C + first + k));
        n += 32;
        const TokenAt later = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
        for (int from = 0; from < count; from += EACH) {
            Pack<T> row[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const size_t position = __shfl_sync(0xffffffffu, now.position, from + k);
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
void add_rows_kernel(TDW *dw, const TokenAt *sorted, const TDY *dy, int N, int C, int slices)
{
    const int first = blockIdx.x / slices * ROWS, c = 8 * (blockIdx.x % slices * blockDim.x + threadIdx.x);
    const int left = C - c;
    TokenAt entry[ROWS + 1];
#pragma unroll
    for (int k = 0; k <= ROWS; k++)
        entry[k] = first + k < N ? sorted[first + k] : TokenAt{ -1, 0 };
    int token = first > 0 ? sorted[first - 1].token : -1;
    bool begins[ROWS], ours[ROWS], some = false;
    Pack<TDW> before[ROWS];
    Pack<TDY> row[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        begins[k] = entry[k].token >= 0 && entry[k].token != token;
        token = entry[k].token;
        some |= begins[k];
        ours[k] = some && token >= 0;
        before[k] = load_pack<ALIGNED>((const TDW *)dw + (size_t)entry[k].token * C + c, begins[k] ? left : 0);
        row[k] = load_pack<ALIGNED>(dy + (size_t)entry[k].position * C + c, ours[k] ? left : 0);
    }
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = (begins[k] ? before[k][i] : sum[i]) + row[k][i];
        if (ours[k] && entry[k + 1].token != entry[k].token)
            store_pack<ALIGNED>(dw + (size_t)entry[k].token * C + c, sum, left);
    }
    if (!ours[ROWS - 1] || entry[ROWS].token != token)
        return;
    add_run<ALIGNED>(sum, sorted, dy, first + ROWS, token, c, N, C);
    store_pack<ALIGNED>(dw + (size_t)token * C + c, sum, left);
}

void embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy)
{
    const int N = dy.rows, C = dw.cols;
    CHECK_DENSE(dw, dw.rows, C);
    CHECK_DENSE(dy, N, C);
    if (N == 0)
        return;
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
