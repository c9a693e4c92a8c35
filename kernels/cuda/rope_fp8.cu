/* The rotation where it meets FP8: q, k, v saved in FP8 groups, and the gradient of the projection as a GEMM operand.
 *
 * Forward reads 1.125 bytes and writes 2 per element. Backward turns in both passes of group scaling: 2 bytes read twice
 * (the partner half of a head comes from the cache), 2 written. */
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/tiles.cuh"

/* Eight neighbours of a row of [q|k|v], turned by sign * angle; v stays. D is a multiple of 16, so a pack and its
 * partner, half a head away, are whole packs. */
/* WIDTH: D where it is 64 or 128, so that no integer division is left; 0: any. */
template <class Reader, int WIDTH> struct TurnSource {
    enum { OUTPUTS = 1, MEASURED = 1 };
    Reader x;
    const float *rope;          /* (T, D/2, 2) */
    float sign;
    int T, head, turned;        /* head: D; turned: columns of q and k together */
    struct Raw { typename Reader::Raw own, partner; };
    __device__ unsigned width() const
    {
        return WIDTH ? WIDTH : head;
    }
    __device__ int partner(int col) const
    {
        const unsigned D = width();
        return (unsigned)col % D < D / 2 ? col + D / 2 : col - D / 2;
    }
    __device__ Raw fetch(int row, int col) const
    {
        return { x.fetch(row, col), x.fetch(row, col < turned ? partner(col) : col) };
    }
    __device__ void values(float (&y)[1][8], const Raw &raw, int row, int col) const
    {
        x.values(y[0], raw.own);
        if (col >= turned)
            return;
        float other[8];
        x.values(other, raw.partner);
        const unsigned D = width(), in_head = (unsigned)col % D, i = in_head < D / 2 ? in_head : in_head - D / 2;
        const float4 *angle = (const float4 *)(rope + ((unsigned)row % (unsigned)T * (D / 2) + i) * 2);
        const float side = in_head < D / 2 ? -sign : sign;      /* a cos - b sin; b cos + a sin */
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 a = angle[k];
            y[0][2 * k] = y[0][2 * k] * a.x + side * (other[2 * k] * a.y);
            y[0][2 * k + 1] = y[0][2 * k + 1] * a.z + side * (other[2 * k + 1] * a.w);
        }
    }
};

/* f(source) with the width of the head known to the compiler where it is a common one. */
template <class Reader, typename F> static void with_turn(Reader x, float sign, Attention a, F f)
{
    const int turned = (a.H + a.K) * a.D;
    if (a.D % 16)
        die("head_dim %d: FP8 needs a multiple of 16", a.D);
    if (a.D == 128)
        f(TurnSource<Reader, 128>{ x, a.rope, sign, a.T, a.D, turned });
    else if (a.D == 64)
        f(TurnSource<Reader, 64>{ x, a.rope, sign, a.T, a.D, turned });
    else
        f(TurnSource<Reader, 0>{ x, a.rope, sign, a.T, a.D, turned });
}

/* A block turns one row. */
template <class Source> __global__ __launch_bounds__(512) void turn_rows_kernel(bf16 *y, Source source, int cols)
{
    const int row = blockIdx.x;
    for (int col = 8 * threadIdx.x; col < cols; col += 8 * blockDim.x) {
        float v[1][8];
        source.values(v, source.fetch(row, col), row, col);
        store_pack<true>(y + (size_t)row * cols + col, v[0], 8);
    }
}

void rope_forward_fp8(Tensor y, Tensor x, Attention a)
{
    if (y.format.dtype != BF16)
        die("rope_forward: %s from %s; the CUDA back end writes bf16 here", format_name(y.format), format_name(x.format));
    with_reader(x, [&](auto reader) {
        with_turn(reader, 1, a, [&](auto source) {
            turn_rows_kernel<<<x.rows, 512, 0, device_stream()>>>((bf16 *)y.data, source, x.cols);
        });
    });
    LAUNCH_CHECK();
}

void rope_backward_fp8(Tensor dx, Tensor dy, Attention a)
{
    check_operand("rope_backward", "dx", dx, dy.rows, dy.cols);
    float *amax = amax_slot();
    with_type(dy, [&](auto *d) {
        const DenseReader<std::remove_pointer_t<decltype(d)>> reader = { d, dy.cols };
        with_turn(reader, -1, a, [&](auto source) {
            fp8_amax(amax, source, dy.rows, dy.cols);
            fp8_tiles<decltype(source)>({ { tile_out(dx, amax, 0) } }, source, dy.rows, dy.cols);
        });
    });
}
