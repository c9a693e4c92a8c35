/* Rows of the embedding table.
 *
 * Forward: one block per token; 4 bytes per element in BF16 (w, y).
 * Backward: positions are sorted by token (CUB's radix sort, stable), then one block per position that begins a run
 * of equal tokens adds the run's rows, in F32 and in their order, to the row of dw, which is read and written once.
 * Bytes per element in BF16: 2 of dy and 4 for every different token. No atomics: the same bits every time, those
 * of the CPU. */
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/vector.cuh"

enum { PACKS = 4, MAX_THREADS = 256, IOTA_THREADS = 256, ROWS = 8 };

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

__global__ void iota_kernel(int *x, int n)
{
    const int i = blockIdx.x * IOTA_THREADS + threadIdx.x;
    if (i < n)
        x[i] = i;
}

/* token, position: (N), sorted. ROWS rows of dy are in flight at a time: a frequent token is a long chain of sums. */
template <bool ALIGNED, typename TDW, typename TDY> __global__ __launch_bounds__(MAX_THREADS)
void embedding_backward_kernel(TDW *dw, const int *token, const int *position, const TDY *dy, int N, int C)
{
    const int begin = blockIdx.x, t = token[begin];
    const int c = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (c >= C || (begin > 0 && token[begin - 1] == t))
        return;
    const Pack<TDW> before = load_pack<ALIGNED>((const TDW *)dw + (size_t)t * C + c, C - c);
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = before[i];
    for (int n = begin; n < N && token[n] == t; n += ROWS) {
        Pack<TDY> row[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const bool ours = n + k < N && token[n + k] == t;
            row[k] = load_pack<ALIGNED>(dy + (size_t)(ours ? position[n + k] : 0) * C + c, ours ? C - c : 0);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += row[k][i];            /* 0 behind the end of the run */
    }
    store_pack<ALIGNED>(dw + (size_t)t * C + c, sum, C - c);
}

struct Sorted { int *token, *position; };

/* Scratch: the two sorted arrays and the unsorted positions; CUB's own. */
static Sorted sort_by_token(const int *tokens, int N, int V)
{
    int *memory = (int *)device_scratch(3 * (size_t)N * sizeof(int), SCRATCH_0);
    const Sorted s = { memory, memory + N };
    int *unsorted = memory + 2 * (size_t)N, bits = 1;
    size_t bytes = 0;
    while (bits < 31 && V > 1 << bits)
        bits++;
    iota_kernel<<<(unsigned)ceil_div(N, IOTA_THREADS), IOTA_THREADS, 0, device_stream()>>>(unsorted, N);
    LAUNCH_CHECK();
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, bytes, tokens, s.token, unsorted, s.position, N, 0, bits,
                                               device_stream()));
    void *temporary = device_scratch(bytes, SCRATCH_1);
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temporary, bytes, tokens, s.token, unsorted, s.position, N, 0, bits,
                                               device_stream()));
    return s;
}

void embedding_backward(Tensor dw, const int *tokens, Tensor dy)
{
    const int N = dy.rows, C = dw.cols;
    CHECK_DENSE(dw, dw.rows, C);
    CHECK_DENSE(dy, N, C);
    if (N == 0)
        return;
    const Sorted s = sort_by_token(tokens, N, dw.rows);
    const int threads = block_threads((int)ceil_div(C, 8), 1, MAX_THREADS);
    const dim3 grid(N, (unsigned)ceil_div(C, 8 * threads));
    with_bool(is_aligned(dw, C) && is_aligned(dy, C), [&](auto aligned) {
        with_type(dw, [&](auto *out) {
            with_type(dy, [&](auto *in) {
                embedding_backward_kernel<decltype(aligned)::value><<<grid, threads, 0, device_stream()>>>(
                    out, s.token, s.position, in, N, C);
            });
        });
    });
    LAUNCH_CHECK();
}
