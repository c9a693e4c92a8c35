/* The rotation where it meets FP8: q, k, v saved in FP8 groups, and the gradient of the projection as a GEMM operand.
 *
 * Forward reads 1.125 bytes and writes 2 per element. Backward turns in both passes of group scaling: 2 bytes read twice
 * (the partner half of a head comes from the cache), 2 written. */
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/tiles.cuh"

/* Eight neighbours of a row of [q|k|v], turned by sign * angle; v stays. D is a multiple of 16, so a pack and its
 * partner, half a head away, are whole packs. */
template <class Reader> struct TurnSource {
    enum { OUTPUTS = 1, MEASURED = 1 };
    Reader x;
    const float *rope;          /* (T, D/2, 2) */
    float sign;
    int T, D, turned;           /* columns of q and k together */
    struct Raw { typename Reader::Raw own, partner; };
    __device__ int partner(int col) const
    {
        return col % D < D / 2 ? col + D / 2 : col - D / 2;
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
        const int i = col % D < D / 2 ? col % D : col % D - D / 2;
        const float4 *angle = (const float4 *)(rope + ((size_t)(row % T) * (D / 2) + i) * 2);
        const float side = col % D < D / 2 ? -sign : sign;      /* a cos - b sin; b cos + a sin */
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float4 a = angle[k];
            y[0][2 * k] = y[0][2 * k] * a.x + side * (other[2 * k] * a.y);
            y[0][2 * k + 1] = y[0][2 * k + 1] * a.z + side * (other[2 * k + 1] * a.w);
        }
    }
};

template <class Reader> static TurnSource<Reader> turn_source(Reader x, float sign, Attention a)
{
    if (a.D % 16)
        die("head_dim %d: FP8 needs a multiple of 16", a.D);
    return { x, a.rope, sign, a.T, a.D, (a.H + a.K) * a.D };
}

template <class Source> __global__ __launch_bounds__(256) void turn_rows_kernel(bf16 *y, Source source, int rows, int cols)
{
    const int packs = cols / 8;
    const size_t at = (size_t)blockIdx.x * 256 + threadIdx.x;
    const int row = (int)(at / packs), col = (int)(at % packs) * 8;
    if (row >= rows)
        return;
    float v[1][8];
    source.values(v, source.fetch(row, col), row, col);
    store_pack<true>(y + (size_t)row * cols + col, v[0], 8);
}

void rope_forward_fp8(Tensor y, Tensor x, Attention a)
{
    if (y.format.dtype != BF16)
        die("rope_forward: %s from %s; the CUDA back end writes bf16 here", format_name(y.format), format_name(x.format));
    with_reader(x, [&](auto reader) {
        const auto source = turn_source(reader, 1, a);
        turn_rows_kernel<<<(unsigned)ceil_div(tensor_numel(x) / 8, 256), 256, 0, device_stream()>>>((bf16 *)y.data, source,
                                                                                                  x.rows, x.cols);
    });
    LAUNCH_CHECK();
}

void rope_backward_fp8(Tensor dx, Tensor dy, Attention a)
{
    check_operand("rope_backward", "dx", dx, dy.rows, dy.cols);
    float *amax = amax_slot();
    with_type(dy, [&](auto *d) {
        typedef DenseReader<std::remove_pointer_t<decltype(d)>> Reader;
        const TurnSource<Reader> source = turn_source(Reader{ d, dy.cols }, -1, a);
        fp8_amax(amax, source, dy.rows, dy.cols);
        fp8_tiles<TurnSource<Reader>>({ { tile_out(dx, amax, 0) } }, source, dy.rows, dy.cols);
    });
}
