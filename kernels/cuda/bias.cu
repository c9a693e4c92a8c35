/* The gradient of a layer's bias, db += dyT 1, and rows filled with a bias.
 *
 * dy is read once. A warp has 256 columns, eight per lane, and every eighth of its block's 256
 * rows. A warp sums its elements in F32. The block adds the sums of its warps in their order, and
 * writes a row of scratch memory. These rows are added in F64. The division into blocks depends on
 * the shape only, so all GPUs give the same bits. */
#include "kernels/cuda/readers.cuh"

static constexpr int WARPS = 8, COLUMNS = 256, ROWS = 256, EACH = 4;

/* partial: (gridDim.y, O), the sums over the rows of each block. */
template <class Reader>
__global__ __launch_bounds__(32 * WARPS) void partial_columns_kernel(float *partial, Reader dy,
                                                                     int N, int O)
{
    __shared__ float shared[WARPS][COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              column = blockIdx.x * COLUMNS + 8 * lane;
    const int last = min(N, (int)(blockIdx.y + 1) * ROWS);
    float sum[8] = {};
    for (int n = blockIdx.y * ROWS + warp; n < last; n += EACH * WARPS) {
        typename Reader::Raw raw[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++)
            raw[e] =
                dy.at((size_t)(n + e * WARPS) * O + column, n + e * WARPS < last ? O - column : 0);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float x[8];
            dy.values(x, raw[e]);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        shared[warp][8 * lane + i] = sum[i];
    __syncthreads();
    const int c = blockIdx.x * COLUMNS + threadIdx.x;
    if (c >= O)
        return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        total += shared[w][threadIdx.x];
    partial[(size_t)blockIdx.y * O + c] = total;
}

void backend_matmul_db(Tensor db, Tensor dy)
{
    const int N = dy.rows, O = dy.cols;
    if (!db.data)
        return;
    check_matmul_db(db, dy);
    check_aligned("matmul_db", O, dy);
    const int blocks = (int)ceil_div(N, ROWS);
    float *partial = (float *)device_scratch((size_t)blocks * O * sizeof(float), SCRATCH_0);
    with_reader(dy, [&](auto in) {
        partial_columns_kernel<<<dim3((unsigned)ceil_div(O, COLUMNS), (unsigned)blocks), 32 * WARPS,
                                 0, device_stream()>>>(partial, in, N, O);
    });
    LAUNCH_CHECK();
    db.rows = 1, db.cols = O;
    add_column_sums(db, partial, blocks, O);
}

/* Each block fills one row. */
__global__ void fill_rows_kernel(float *y, const float *bias, int O)
{
    for (int o = threadIdx.x; o < O; o += blockDim.x)
        y[(size_t)blockIdx.x * O + o] = bias[o];
}

void fill_rows(Tensor y, Tensor bias)
{
    fill_rows_kernel<<<(unsigned)y.rows, 256, 0, device_stream()>>>(
        (float *)y.data, (const float *)bias.data, y.cols);
    LAUNCH_CHECK();
}
