/* Copies rows of tokens to rows of assignments, and back.
 *
 * Bytes per element of x and of an assignment: gather to BF16 reads 2 and writes 2. Gather to FP8
 * reads 2, and writes 1 for each copy. Blocks process all rows of 64 columns before they process
 * the next columns. So all assignments of a token read its columns while these are in the L2 cache.
 * The sum reads 2 per assignment, and reads and writes 2 per token. */
#include "kernels/cuda/tiles.cuh"

enum { THREADS = 256, AT_ONCE = 8 };

/* ---- gather ---------------------------------------------------------------------------------- */

/* The token of each row of assignments; -1: padding. */
struct RowTokens {
    const int *assignment, *end; /* *end: the row after the last row in use */
    int top_k;
    __device__ int of(int row) const
    {
        const int a = assignment[row];
        return a < 0 ? -1 : a / top_k;
    }
};

template <class Reader>
struct GatherSource : SimpleSource {
    Reader x;
    RowTokens tokens;
    typedef typename Reader::Raw Raw;
    __device__ Raw fetch(int row, int col) const
    {
        const int n = tokens.of(row);
        return x.at((size_t)max(n, 0) * x.cols + col, n < 0 ? 0 : 8);
    }
    __device__ void values(float (&y)[1][8], const Raw &raw, Fix, int, int) const
    {
        x.values(y[0], raw);
    }
};

/* As fp8_tile_kernel, but blocks process all rows of 64 columns before the next columns. */
template <class Source>
__global__ __launch_bounds__(TILE_THREADS, 3) void gather_tile_kernel(TileOuts<Source> outs,
                                                                      Source source, int rows,
                                                                      int cols)
{
    __shared__ uint32_t t[TILE_COLS * 33];
    if ((int)blockIdx.x * TILE_ROWS < *source.tokens.end)
        encode_tile(outs, source, blockIdx.x * TILE_ROWS, blockIdx.y * TILE_COLS, rows, cols, t);
}

/* Each thread computes a pack of y. */
template <typename T>
__global__ __launch_bounds__(THREADS) void gather_kernel(AnyOut y, const T *x, RowTokens tokens,
                                                         int C)
{
    const unsigned i = blockIdx.x * THREADS + threadIdx.x, packs = C / 8;
    const int row = i / packs, column = i % packs * 8;
    if (row >= *tokens.end)
        return;
    const int n = tokens.of(row);
    const Pack<T> pack = load_pack(x + (size_t)max(n, 0) * C + column, n < 0 ? 0 : 8);
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        v[k] = pack[k];
    store_any(y, (size_t)row * C + column, v, 8);
}

static RowTokens row_tokens(Routing r)
{
    return { r.assignment, r.first + r.experts, r.top_k };
}

/* The scale of y is known. */
static void gather(const char *op, Tensor y, Tensor x, Routing r)
{
    const int C = x.cols, rows = y.rows;
    check_aligned(op, C, x, y);
    if (!format_is_fp8(y.format)) {
        with_type(x, [&](auto *in) {
            gather_kernel<<<(unsigned)ceil_div((size_t)rows * C, 8 * THREADS), THREADS, 0,
                            device_stream()>>>(any_out(y), in, row_tokens(r), C);
        });
        LAUNCH_CHECK();
        return;
    }
    check_operand(op, "y", y, rows, C);
    const dim3 grid(rows / TILE_ROWS, (unsigned)ceil_div(C, TILE_COLS));
    with_dense_reader(x, [&](auto reader) {
        typedef GatherSource<decltype(reader)> Source;
        gather_tile_kernel<Source><<<grid, TILE_THREADS, 0, device_stream()>>>(
            { { tile_out(y, NULL) } }, { {}, reader, row_tokens(r) }, rows, C);
    });
    LAUNCH_CHECK();
}

void backend_experts_gather(Tensor y, Tensor x, const float *amax, Routing r)
{
    check_experts_gather(y, x, r);
    if (format_is_fp8(y.format) && amax && !scale_is_reused(y))
        backend_quantize_scale_from(y, amax);
    else if (format_is_fp8(y.format))
        backend_quantize_scale(y, x);
    gather(OPERATION, y, x, r);
}

void backend_experts_gather_again(Tensor y, Tensor x, Routing r)
{
    check_experts_gather_again(y, x, r);
    gather(OPERATION, y, x, r);
}

/* ---- sum ------------------------------------------------------------------------------------- */

/* Each thread computes a pack of y, with AT_ONCE loads in flight. add.data is NULL if nothing is
 * added. */
template <typename T>
__global__ __launch_bounds__(THREADS) void sum_kernel(AnyOut y, const T *x, AnyIn add,
                                                      const int *row, int N, int K, int C)
{
    const unsigned i = blockIdx.x * THREADS + threadIdx.x, packs = C / 8;
    const int n = i / packs, column = i % packs * 8;
    const size_t at = (size_t)n * C + column;
    float sum[8] = {}, start[8] = {};
    if (n >= N)
        return;
    if (add.data)
        load_any(start, add, at, 8);
    for (int first = 0; first < K; first += AT_ONCE) {
        Pack<T> in[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const bool there = first + j < K;
            const size_t from = there ? (size_t)row[(size_t)n * K + first + j] : 0;
            in[j] = load_pack(x + from * C + column, there ? 8 : 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int k = 0; k < 8; k++)
                sum[k] += in[j][k];
    }
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum[k] += start[k];
    store_any(y, at, sum, 8);
}

void backend_experts_sum(Tensor y, Tensor x, Tensor add, Routing r)
{
    const int N = r.tokens, K = r.top_k, C = x.cols;
    check_experts_sum(y, x, add, r);
    check_aligned(OPERATION, C, y, x, add);
    with_type(x, [&](auto *in) {
        sum_kernel<<<(unsigned)ceil_div((size_t)N * C, 8 * THREADS), THREADS, 0, device_stream()>>>(
            any_out(y), in, any_in(add), r.row, N, K, C);
    });
    LAUNCH_CHECK();
}
