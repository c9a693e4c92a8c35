/* y = x wT [+ add] for one BF16 row x, as in decoding. Each element of w is used once, so the
 * memory bandwidth limits the speed.
 *
 * The kernel reads 2 bytes per element of w. A warp has two rows of w, with eight loads of 16 bytes
 * per lane in flight. The warp reads x from L1, half as many bytes as it reads of w. Rounding: sums
 * are in F32, in one order, and are rounded once, after add. cuBLASLt rounds twice here
 * (matmul.c). */
#include "kernels/cuda/vector.cuh"

/* STEP: number of elements that a warp loads at once */
static constexpr int WARPS = 4, ROWS = 2, EACH = 4, STEP = 32 * 8;

template <typename TY>
__global__ void __launch_bounds__(32 * WARPS)
    row_kernel(TY *y, const bf16 *x, const bf16 *w, const TY *add, int C, int O)
{
    const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    float sum[ROWS] = {};
    for (int c = 8 * lane; c < C; c += EACH * STEP) {
        Pack<bf16> in[EACH], row[ROWS][EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                row[r][e] = load_pack<true>(w + (size_t)(first + r) * C + c + e * STEP,
                                            first + r < O ? C - c - e * STEP : 0);
            in[e] = load_pack<true>(x + c + e * STEP, C - c - e * STEP);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum[r] += in[e][i] * row[r][e][i];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float total = warp_sum(sum[r]);
        if (lane == 0 && first + r < O)
            y[first + r] = from_float<TY>(add ? total + to_float(add[first + r]) : total);
    }
}

template <typename TY>
static void launch(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const unsigned blocks = (unsigned)ceil_div(w.rows, WARPS * ROWS);
    row_kernel<TY><<<blocks, 32 * WARPS, 0, device_stream()>>>(
        (TY *)y.data, (const bf16 *)x.data, (const bf16 *)w.data, (const TY *)add.data, w.cols,
        w.rows);
    LAUNCH_CHECK();
}

bool matmul_row(Tensor y, Tensor x, Tensor w, Tensor add)
{
    if (x.rows != 1 || x.format.dtype != BF16 || w.format.dtype != BF16 || !is_aligned(x, x.cols) ||
        !is_aligned(w, w.cols))
        return false;
    if (y.format.dtype == F32)
        launch<float>(y, x, w, add);
    else
        launch<bf16>(y, x, w, add);
    return true;
}
