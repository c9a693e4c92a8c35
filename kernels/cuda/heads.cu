/* Columns of heads, exchanged to ranks. A thread moves 16 bytes. */
#include "kernels/cuda/vector.cuh"

enum { THREADS = 256 };

/* In 16 bytes: columns of q, and of k and v, of one rank; all columns of a rank; rows. Only q: kv is 0. */
struct Layout { int q, kv, part, ranks; size_t rows; };

/* Where column `at` of a rank's part is in the row of all heads. */
__device__ static inline int column_of(Layout d, int rank, int at)
{
    if (at < d.q)
        return rank * d.q + at;
    const int section = (at - d.q) / d.kv;          /* 0: k, 1: v */
    return d.ranks * (d.q + section * d.kv) + rank * d.kv + (at - d.q - section * d.kv);
}

template <bool JOIN> __global__ __launch_bounds__(THREADS) void exchange_kernel(uint4 *to, const uint4 *from, Layout d)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= d.rows * (size_t)d.part * (size_t)d.ranks)
        return;
    const size_t row = i / (size_t)d.part;
    const int rank = (int)(row / d.rows), at = (int)(i % (size_t)d.part);
    const size_t all = row % d.rows * (size_t)d.part * (size_t)d.ranks + (size_t)column_of(d, rank, at);
    to[JOIN ? all : i] = from[JOIN ? i : all];
}

template <bool JOIN> static void exchange(Tensor y, Tensor x, Attention heads)
{
    const int per = (int)(16 / dtype_size(x.format.dtype)), ranks = y.rows / x.rows;
    if (heads.D % per != 0 || (uintptr_t)x.data % 16 != 0 || (uintptr_t)y.data % 16 != 0)
        die("heads of %d elements; expected a multiple of %d, and tensors aligned to 16 bytes", heads.D, per);
    const int q = heads.H * heads.D / per, part = y.cols / per;
    const Layout d = { q, (part - q) / 2, part, ranks, (size_t)x.rows };
    const void *from = JOIN ? y.data : x.data;
    exchange_kernel<JOIN><<<(unsigned)ceil_div((size_t)y.rows * (size_t)part, THREADS), THREADS, 0, device_stream()>>>(
        (uint4 *)(JOIN ? x.data : y.data), (const uint4 *)from, d);
    LAUNCH_CHECK();
}

void backend_heads_split(Tensor y, Tensor x, Attention heads)
{
    check_exchange(OPERATION, y, x, heads);
    exchange<false>(y, x, heads);
}

void backend_heads_join(Tensor x, Tensor y, Attention heads)
{
    check_exchange(OPERATION, y, x, heads);
    exchange<true>(y, x, heads);
}
