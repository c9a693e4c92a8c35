/* Grouped GEMMs for all GPUs, and for operands that the kernel for Hopper does not support. A block
 * has a tile of 64 x 64 of one expert. FP8 operands become BF16 in shared memory, which is exact.
 * BF16 products run on the tensor cores, F32 products do not. */
#include "kernels/cuda/experts_gemm.cuh"
#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/mma.cuh"

namespace
{

constexpr int TILE = 64, STEP = 32, THREADS = 128;

/* Element (i, k) of expert e is data[e expert + i row + k term]. scale: the scale of the operand,
 * or of expert 0; the scales of experts are scale_step floats apart; NULL: 1. */
struct Operand {
    const void *data;
    DType dtype;
    int64_t expert, row, term;
    const float *scale;
    int scale_step;
};

struct Job {
    Operand a, b;
    AnyOut out;
    bool adds, by_expert; /* adds: adds to out; by_expert: out is dw */
    /* number of rows of an expert's dw; number of terms of a sum, unless by_expert */
    int rows, cols, terms;
    const int *first;
    int experts;
};

__device__ float element(const Operand &x, int64_t at)
{
    switch (x.dtype) {
    case F32: return ((const float *)x.data)[at];
    case BF16: return to_float(((const bf16 *)x.data)[at]);
    case E4M3: return decode<E4M3>(((const uint8_t *)x.data)[at]);
    default: return decode<E5M2>(((const uint8_t *)x.data)[at]);
    }
}

/* Loads rows first_row .. and terms first_term .. of an operand. Elements from `rows` and `terms` on
 * become 0. Neighbouring threads load neighbouring elements. */
template <typename T>
__device__ void load_tile(char *tile, const Operand &x, int e, int first_row, int rows,
                          int first_term, int terms)
{
    for (int n = threadIdx.x; n < TILE * STEP; n += THREADS) {
        const int i = x.term == 1 ? n / STEP : n % TILE, k = x.term == 1 ? n % STEP : n / TILE;
        const bool there = first_row + i < rows && first_term + k < terms;
        const int64_t at = e * x.expert + (first_row + i) * x.row + (first_term + k) * x.term;
        *(T *)(tile + i * PITCH<T, STEP> + k * sizeof(T)) =
            from_float<T>(there ? element(x, at) : 0.0f);
    }
}

typedef float Sums[2][4][4];

/* Adds the products of two tiles. A warp has 32 x 32 sums, as mma.cuh lays them out. */
__device__ void add_tiles(Sums &sum, const char *a, const char *b, bf16)
{
    add_product<bf16, STEP / DEPTH<bf16>>(sum, Along<PITCH<bf16, STEP>, false>(shared_address(a)),
                                          Along<PITCH<bf16, STEP>, true>(shared_address(b)));
}

__device__ void add_tiles(Sums &sum, const char *a, const char *b, float)
{
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < STEP; k++)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = 16 * m + lane / 4 + 8 * (i / 2),
                              col = 8 * n + 2 * (lane % 4) + i % 2;
                    sum[m][n][i] += ((const float *)(a + row * PITCH<float, STEP>))[k] *
                                    ((const float *)(b + col * PITCH<float, STEP>))[k];
                }
}

__device__ void store(const Job &job, size_t at, float value)
{
    if (job.out.is_f32) {
        float *to = (float *)job.out.data + at;
        *to = job.adds ? *to + value : value;
    } else {
        bf16 *to = (bf16 *)job.out.data + at;
        *to = from_float<bf16>(job.adds ? to_float(*to) + value : value);
    }
}

template <typename T>
__global__ __launch_bounds__(THREADS) void grouped_kernel(Job job)
{
    __shared__ __align__(16) char a[TILE * PITCH<T, STEP>], b[TILE * PITCH<T, STEP>];
    const int row = blockIdx.x * TILE, col = blockIdx.y * TILE, lane = threadIdx.x % 32;
    const int in_use = job.first[job.experts], rows = job.by_expert ? job.rows : in_use;
    if (row >= rows)
        return;
    const int e = job.by_expert ? blockIdx.z : expert_of(job.first, job.experts, row);
    const int begin = job.by_expert ? job.first[e] : 0,
              end = job.by_expert ? job.first[e + 1] : job.terms;
    const int warp_row = threadIdx.x / 64 * 32, warp_col = threadIdx.x / 32 % 2 * 32;
    Sums sum = {};
    for (int k = begin; k < end; k += STEP) {
        load_tile<T>(a, job.a, e, row, rows, k, end);
        load_tile<T>(b, job.b, e, col, job.cols, k, end);
        __syncthreads();
        add_tiles(sum, a + warp_row * PITCH<T, STEP>, b + warp_col * PITCH<T, STEP>, T());
        __syncthreads();
    }
    const float scale = (job.a.scale ? *job.a.scale : 1.0f) *
                        (job.b.scale ? job.b.scale[e * job.b.scale_step] : 1.0f);
    const size_t out_row = (size_t)(job.by_expert ? e * job.rows : 0) + row + warp_row + lane / 4,
                 last = (size_t)(job.by_expert ? e * job.rows : 0) + rows;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const size_t r = out_row + 16 * m + 8 * (i / 2);
                const int c = col + warp_col + 8 * n + 2 * (lane % 4) + i % 2;
                if (r < last && c < job.cols)
                    store(job, r * job.cols + c, sum[m][n][i] * scale);
            }
}

/* Describes the operand t, (rows, cols) for each expert, or for all experts together if `shared`.
 * The sum runs along its rows, or along its columns if `columns`; for this, FP8 operands have a
 * transposed copy. */
Operand operand_of(Tensor t, int rows, bool shared, bool columns)
{
    const bool fp8 = format_is_fp8(t.format), transposed = fp8 && columns;
    const int64_t down = columns ? 1 : t.cols, along = columns ? t.cols : 1;
    return {
        transposed ? t.data_t : t.data, t.format.dtype,         shared ? 0 : (int64_t)rows * t.cols,
        transposed ? rows : down,       transposed ? 1 : along, fp8 ? (const float *)t.scale : NULL,
        shared ? 0 : SCALE_FLOATS
    };
}

void run_anywhere(const GroupedGemm &g)
{
    const bool dw = g.kind == GROUPED_DW;
    const int E = g.r.experts, rows = grouped_rows(g), cols = grouped_columns(g);
    const Job job = { operand_of(g.a, g.a.rows, true, dw),
                      dw ? operand_of(g.b, g.b.rows, true, true)
                         : operand_of(g.b, g.b.rows / E, false, g.kind == GROUPED_DX),
                      any_out(g.out),
                      dw && !g.out.empty,
                      dw,
                      rows,
                      cols,
                      g.a.cols,
                      g.r.first,
                      E };
    const dim3 grid((unsigned)ceil_div(rows, TILE), (unsigned)ceil_div(cols, TILE), dw ? E : 1);
    (g.a.format.dtype == F32 ? grouped_kernel<float>
                             : grouped_kernel<bf16>)<<<grid, THREADS, 0, device_stream()>>>(job);
    LAUNCH_CHECK();
}

void run(const GroupedGemm &g)
{
    if (!grouped_gemm_fused(g) && !grouped_gemm_sm90(g))
        run_anywhere(g);
}

} // namespace

void backend_experts_matmul(Tensor y, Tensor x, Tensor w, Routing r)
{
    check_experts_matmul(y, x, w, r);
    run({ GROUPED_MATMUL, y, x, w, r });
}

void backend_experts_matmul_dx(Tensor dx, Tensor dy, Tensor w, Routing r)
{
    check_experts_matmul_dx(dx, dy, w, r);
    run({ GROUPED_DX, dx, dy, w, r });
}

void backend_experts_matmul_dw(Tensor dw, Tensor dy, Tensor x, Routing r)
{
    if (!dw.data)
        return;
    check_experts_matmul_dw(dw, dy, x, r);
    run({ GROUPED_DW, dw, dy, x, r });
}
