/* The rotation with FP8: q, k, v saved in FP8 groups, and the gradient of the projection as a GEMM
 * operand.
 *
 * Per element, forward reads 1.06 bytes and writes 2. Backward rotates in both passes of group
 * scaling. Backward reads 2 bytes twice, or once if the scale is reused, and writes 2. */
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/tiles.cuh"

/* Computes two packs of a row of [q|k|v] that are half a head apart, rotated by sign * angle. v is
 * not rotated. The columns of this source are the first halves of the heads, one after the other.
 * WIDTH is D if D is 64 or 128, to avoid integer divisions, else 0. D is a multiple of 16, so half
 * a head consists of whole packs. */
template <class Reader, int WIDTH>
struct RotatedSource : SimpleSource {
    enum { OUTPUTS = 2, MEASURED = 2 };
    Reader x;
    const float *rope; /* (T, D/2, 2) */
    float sign;
    int T, half_width, rotated; /* half_width: D/2; rotated: the source's columns of q and k */
    struct Raw {
        typename Reader::Raw a, b;
    };
    __device__ unsigned half() const
    {
        return WIDTH ? WIDTH / 2 : half_width;
    }
    __device__ int column(int output, int col) const
    {
        return (int)((unsigned)col / half() * half()) + col + output * (int)half();
    }
    __device__ Raw fetch(int row, int col) const
    {
        return { load_inside(x, row, column(0, col)), load_inside(x, row, column(1, col)) };
    }
    __device__ void values(float (&y)[2][8], const Raw &raw, Fix, int row, int col) const
    {
        float a[8], b[8];
        x.values(a, raw.a);
        x.values(b, raw.b);
        const unsigned at = (unsigned)row % (unsigned)T * half() + (unsigned)col % half();
        const float4 *angle = (const float4 *)(rope + 2 * at);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 r = col < rotated ? angle[k] : make_float4(1, 0, 1, 0);
            const float sine[2] = { sign * r.y, sign * r.w }, cosine[2] = { r.x, r.z };
#pragma unroll
            for (int i = 0; i < 2; i++) {
                y[0][2 * k + i] = a[2 * k + i] * cosine[i] - b[2 * k + i] * sine[i];
                y[1][2 * k + i] = b[2 * k + i] * cosine[i] + a[2 * k + i] * sine[i];
            }
        }
    }
};

/* Calls f(source). Common widths of heads are template parameters. */
template <class Reader, typename F>
static void with_rotation(Reader x, float sign, Attention a, F f)
{
    const int half = a.D / 2, rotated = (a.H + a.K) * half;
    if (a.D % 16)
        die("head_dim %d: FP8 needs a multiple of 16", a.D);
    if (a.D == 128)
        f(RotatedSource<Reader, 128>{ {}, x, a.rope, sign, a.T, half, rotated });
    else if (a.D == 64)
        f(RotatedSource<Reader, 64>{ {}, x, a.rope, sign, a.T, half, rotated });
    else
        f(RotatedSource<Reader, 0>{ {}, x, a.rope, sign, a.T, half, rotated });
}

/* Each block computes one row. */
template <class Source>
__global__ __launch_bounds__(512) void rotate_rows_kernel(bf16 *y, Source source, int cols)
{
    const int row = blockIdx.x;
    for (int col = 8 * threadIdx.x; 2 * col < cols; col += 8 * blockDim.x) {
        float v[2][8];
        source.values(v, source.fetch(row, col), source.prepare(col), row, col);
        store_pack<true>(y + (size_t)row * cols + source.column(0, col), v[0], 8);
        store_pack<true>(y + (size_t)row * cols + source.column(1, col), v[1], 8);
    }
}

void rope_forward_fp8(Tensor y, Tensor x, Attention a)
{
    if (y.format.dtype != BF16)
        die("rope_forward: y is %s, x is %s; the CUDA back end writes bf16 from FP8",
            format_name(y.format), format_name(x.format));
    with_reader(x, [&](auto reader) {
        with_rotation(reader, 1, a, [&](auto source) {
            const int threads = block_threads(x.cols / 16, 2, 512);
            rotate_rows_kernel<<<x.rows, threads, 0, device_stream()>>>((bf16 *)y.data, source,
                                                                        x.cols);
        });
    });
    LAUNCH_CHECK();
}

void rope_backward_fp8(Tensor dx, Tensor dy, Attention a)
{
    check_operand("rope_backward", "dx", dx, dy.rows, dy.cols);
    with_dense_reader(dy, [&](auto reader) {
        with_rotation(reader, -1, a,
                      [&](auto source) { fp8_operand(dx, {}, source, dy.rows, dy.cols / 2); });
    });
}
