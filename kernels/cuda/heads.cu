/* Exchange of columns between rows of all heads and rows of one rank's heads. A thread moves 16
 * bytes. */
#include "kernels/cuda/vector.cuh"

enum { THREADS = 256 };

/* Sizes in units of 16 bytes. q, kv: the columns of q, and of k or v, of one rank; kv is 0 if rows
 * contain only q. part: all columns of one rank. shared: number of ranks that have the same key
 * head. */
struct Layout {
    int q, kv, part, ranks, shared;
    size_t rows;
};

/* Returns the column, in rows of all heads, of column `at` in rows of one rank's heads. */
__device__ static inline int column_of(Layout d, int rank, int at)
{
    if (at < d.q)
        return rank * d.q + at;
    const int section = (at - d.q) / d.kv; /* 0: k, 1: v */
    return d.ranks * d.q + (d.ranks / d.shared * section + rank / d.shared) * d.kv +
           (at - d.q - section * d.kv);
}

/* Sums `count` times 16 bytes of elements, in their order, in F32. These 16-byte words are `stride`
 * words apart. */
template <typename T>
__device__ static inline uint4 sum_copies(const uint4 *from, size_t stride, int count)
{
    constexpr int PER = 16 / (int)sizeof(T);
    float sum[PER] = {};
    for (int r = 0; r < count; r++) {
        const uint4 v = from[(size_t)r * stride];
        const T *x = reinterpret_cast<const T *>(&v);
#pragma unroll
        for (int i = 0; i < PER; i++)
            sum[i] += to_float(x[i]);
    }
    uint4 v;
    T *y = reinterpret_cast<T *>(&v);
#pragma unroll
    for (int i = 0; i < PER; i++)
        y[i] = from_float<T>(sum[i]);
    return v;
}

/* Each thread copies 16 bytes of one rank's heads. If several ranks have the same key head, the
 * thread of the first of these ranks adds their gradients. */
template <bool JOIN, typename T>
__global__ __launch_bounds__(THREADS) void exchange_kernel(uint4 *to, const uint4 *from, Layout d)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= d.rows * (size_t)d.part * (size_t)d.ranks)
        return;
    const size_t row = i / (size_t)d.part;
    const int rank = (int)(row / d.rows), at = (int)(i % (size_t)d.part);
    const size_t width = (size_t)(d.ranks * d.q + d.ranks / d.shared * (d.part - d.q));
    const size_t all = row % d.rows * width + (size_t)column_of(d, rank, at);
    if (!JOIN || at < d.q || d.shared == 1)
        to[JOIN ? all : i] = from[JOIN ? i : all];
    else if (rank % d.shared == 0)
        to[all] = sum_copies<T>(from + i, d.rows * (size_t)d.part, d.shared);
}

template <bool JOIN>
static void exchange(Tensor y, Tensor x, Attention heads, int shared)
{
    const int per = (int)(16 / dtype_size(x.format.dtype)), ranks = y.rows / x.rows;
    if (heads.D % per != 0 || (uintptr_t)x.data % 16 != 0 || (uintptr_t)y.data % 16 != 0)
        die("heads of %d elements; expected a multiple of %d, and tensors aligned to 16 bytes",
            heads.D, per);
    const int q = heads.H * heads.D / per, part = y.cols / per;
    const Layout d = { q, (part - q) / 2, part, ranks, shared, (size_t)x.rows };
    const unsigned blocks = (unsigned)ceil_div((size_t)y.rows * (size_t)part, THREADS);
    with_type(JOIN ? y : x, [&](auto *from) {
        using T = std::remove_pointer_t<decltype(from)>;
        exchange_kernel<JOIN, T><<<blocks, THREADS, 0, device_stream()>>>(
            (uint4 *)(JOIN ? x.data : y.data), (const uint4 *)from, d);
    });
    LAUNCH_CHECK();
}

void backend_heads_split(Tensor y, Tensor x, Attention heads)
{
    exchange<false>(y, x, heads, check_exchange(OPERATION, y, x, heads));
}

void backend_heads_join(Tensor x, Tensor y, Attention heads)
{
    exchange<true>(y, x, heads, check_exchange(OPERATION, y, x, heads));
}
