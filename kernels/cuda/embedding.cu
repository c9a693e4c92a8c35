/* Forward and backward of the embedding table. The kernels process tokens in sorted order, so each
 * row of the table is read from memory once.
 *
 * Bytes per element in BF16: forward takes 2 for y and 2 for every distinct token; backward takes 2
 * for dy and 4 for every distinct token. Backward adds the rows of dy with the same token, in F32
 * and in the order of their positions, to the row of dw, which is read and written once. Backward
 * uses no atomics on floats, so its bits equal the CPU's. */
#include "kernels/cuda/vector.cuh"

/* A block has ROWS entries of `sorted`, and MAX_THREADS packs (8 columns each) of their rows. */
enum { ROWS = 8, MAX_THREADS = 128 };

struct Grid {
    unsigned blocks;
    int threads, slices;
};

static Grid grid_of(int N, int C)
{
    const int threads = block_threads((int)ceil_div(C, 8), 1, MAX_THREADS),
              slices = (int)ceil_div(C, 8 * threads);
    return { (unsigned)(ceil_div(N, ROWS) * slices), threads, slices };
}

template <typename T>
__global__ __launch_bounds__(MAX_THREADS) void copy_rows_kernel(AnyOut y, const TokenAt *sorted,
                                                                const T *w, int N, int C,
                                                                int slices)
{
    const int first = blockIdx.x / slices * ROWS,
              c = 8 * (blockIdx.x % slices * blockDim.x + threadIdx.x);
    TokenAt entry[ROWS];
    int left[ROWS];
    Pack<T> row[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        entry[k] = first + k < N ? sorted[first + k] : TokenAt{ 0, 0 };
        left[k] = first + k < N ? C - c : 0;
    }
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        row[k] = load_pack(w + (size_t)entry[k].token * C + c, left[k]);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = row[k][i];
        store_any(y, (size_t)entry[k].position * C + c, x, left[k]);
    }
}

void backend_embedding_forward(Tensor y, const TokenAt *sorted, Tensor w)
{
    const int N = y.rows, C = w.cols;
    CHECK_DENSE(w, w.rows, C);
    CHECK_DENSE(y, N, C);
    check_aligned(OPERATION, C, y, w);
    if (N == 0)
        return;
    const Grid g = grid_of(N, C);
    with_type(w, [&](auto *table) {
        copy_rows_kernel<<<g.blocks, g.threads, 0, device_stream()>>>(any_out(y), sorted, table, N,
                                                                      C, g.slices);
    });
    LAUNCH_CHECK();
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adds to `sum` the rest of a long run: from entry n on, the rows of dy with token t, one by one.
 * c: the thread's column. The sums for a frequent token form a long chain, which would wait for
 * memory. So rows are prefetched to L2, 32 rows ahead. */
template <typename T>
__device__ static inline void add_run(float (&sum)[8], const TokenAt *sorted, const T *dy, int n,
                                      int t, int c, int N, int C)
{
    constexpr int EACH = 32 / sizeof(T); /* number of rows in flight */
    const int lane = threadIdx.x % 32, first = c - 8 * lane;
    const TokenAt none = { -1, 0 };
    TokenAt now = n + lane < N ? sorted[n + lane] : none,
            next = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
    for (;;) {
        const int count = __popc(__ballot_sync(0xffffffffu, now.token == t));
        if (next.token == t)
#pragma unroll
            for (int k = 0; k < 256; k += 128 / sizeof(T))
                if (first + k < C)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(dy + (size_t)next.position * C +
                                                                  first + k));
        n += 32;
        const TokenAt later = n + 32 + lane < N ? sorted[n + 32 + lane] : none;
        for (int from = 0; from < count; from += EACH) {
            Pack<T> row[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const size_t position = __shfl_sync(0xffffffffu, now.position, from + k);
                row[k] = load_pack(dy + position * C + c, from + k < count ? C - c : 0);
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

/* A block sums the runs of equal tokens that begin in its entries. The last run may continue after
 * these entries. All loads of these entries are in flight at once. */
template <typename TDW, typename TDY>
__global__ __launch_bounds__(MAX_THREADS) void add_rows_kernel(TDW *dw, const TokenAt *sorted,
                                                               const TDY *dy, int N, int C,
                                                               int slices)
{
    const int first = blockIdx.x / slices * ROWS,
              c = 8 * (blockIdx.x % slices * blockDim.x + threadIdx.x);
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
        before[k] =
            load_pack((const TDW *)dw + (size_t)entry[k].token * C + c, begins[k] ? left : 0);
        row[k] = load_pack(dy + (size_t)entry[k].position * C + c, ours[k] ? left : 0);
    }
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = (begins[k] ? before[k][i] : sum[i]) + row[k][i];
        if (ours[k] && entry[k + 1].token != entry[k].token)
            store_pack(dw + (size_t)entry[k].token * C + c, sum, left);
    }
    if (!ours[ROWS - 1] || entry[ROWS].token != token)
        return;
    add_run(sum, sorted, dy, first + ROWS, token, c, N, C);
    store_pack(dw + (size_t)token * C + c, sum, left);
}

void backend_embedding_backward(Tensor dw, const TokenAt *sorted, Tensor dy)
{
    const int N = dy.rows, C = dw.cols;
    CHECK_DENSE(dw, dw.rows, C);
    CHECK_DENSE(dy, N, C);
    check_aligned(OPERATION, C, dw, dy);
    if (dw.empty) /* most rows have no token, so the kernel does not write them */
        backend_device_zero(dw.data, tensor_bytes(dw));
    if (N == 0)
        return;
    const Grid g = grid_of(N, C);
    with_type(dw, [&](auto *out) {
        with_type(dy, [&](auto *in) {
            add_rows_kernel<<<g.blocks, g.threads, 0, device_stream()>>>(out, sorted, in, N, C,
                                                                         g.slices);
        });
    });
    LAUNCH_CHECK();
}
