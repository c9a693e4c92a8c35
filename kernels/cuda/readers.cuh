/* Readers load eight neighbouring elements of a row in any format. A Reader has
 *
 *     Raw  at(i, left)                     loads elements i .. i + 7 of the tensor, i a multiple of 8; after `left` elements 0
 *     void values(float (&)[8], Raw)       decodes them
 *     void bring(i, n)                     prefetches n elements (whole rows) to the L2 cache; groups have 16 elements or more
 *
 * Loading and decoding are separate, so that a thread can have several loads in flight. If rows
 * begin at multiples of 16 bytes, left is >= 8 or <= 0. */
#pragma once
#include "kernels/cuda/fp8.cuh"

/* A compile-time number that takes the place of a run-time argument. */
template <auto V>
struct Known {
    __host__ __device__ constexpr operator decltype(V)() const
    {
        return V;
    }
};

template <typename T>
struct DenseReader {
    const T *data;
    int cols;
    typedef Pack<T> Raw;
    __device__ Raw at(size_t i, int left = 8) const
    {
        return load_pack(data + i, left);
    }
    __device__ void values(float (&x)[8], const Raw &raw) const
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = raw[i];
    }
    __device__ void bring(size_t i, int n) const
    {
        prefetch(data + i, n * sizeof(T));
    }
};

/* FP8 codes with one scale. D: DType or Known<a DType>. */
template <class D>
struct TensorReader {
    const uint8_t *data;
    const float *scale;
    D dtype;
    int cols;
    struct Raw {
        uint2 codes;
    };
    __device__ Raw at(size_t i, int left = 8) const
    {
        return left > 0 ? Raw{ *(const uint2 *)(data + i) } : Raw{};
    }
    __device__ void values(float (&x)[8], const Raw &raw) const
    {
        decode_pack(x, raw.codes, *scale, dtype);
    }
    __device__ void bring(size_t i, int n) const
    {
        if (n % 16 == 0)
            prefetch(data + i, n);
    }
};

/* FP8 codes with a scale of one byte per 2^shift elements. S: int or Known<shift>. shift must be at
 * least 3. */
template <class D, class S>
struct GroupReader {
    const uint8_t *data;
    const uint8_t *scale;
    D dtype;
    S shift;
    int cols;
    struct Raw {
        uint2 codes;
        uint8_t scale;
    };
    __device__ Raw at(size_t i, int left = 8) const
    {
        return left > 0 ? Raw{ *(const uint2 *)(data + i), scale[i >> shift] } : Raw{};
    }
    __device__ void values(float (&x)[8], const Raw &raw) const
    {
        decode_pack(x, raw.codes, fp8_group_value(raw.scale, dtype), dtype);
    }
    __device__ void bring(size_t i, int n) const
    {
        prefetch(data + i, n);
        if (n % (16 << shift) == 0)
            prefetch(scale + (i >> shift), n >> shift);
    }
};

/* Loads a pack that is inside its row. */
template <class Reader>
__device__ inline typename Reader::Raw load_inside(const Reader &x, int row, int col)
{
    return x.at((size_t)row * x.cols + col);
}

/* Loads a pack, or zeros if the pack is after the end of its row. */
template <class Reader>
__device__ inline typename Reader::Raw load_or_zero(const Reader &x, int row, int col)
{
    return x.at((size_t)row * x.cols + col, x.cols - col);
}

template <typename F>
static inline void with_dense_reader(Tensor t, F f)
{
    with_type(t, [&](auto *data) {
        f(DenseReader<std::remove_pointer_t<decltype(data)>>{ data, t.cols });
    });
}

/* Returns the reader of a tensor t in groups of 16. D: DType or Known<a DType>. */
template <class D>
static inline GroupReader<D, Known<4>> group_reader(Tensor t, D dtype)
{
    return { (const uint8_t *)t.data, (const uint8_t *)t.scale, dtype, {}, t.cols };
}

/* Calls f(reader of t). The format of codes is a run-time argument, so that there are few
 * instantiations. */
template <typename F>
static inline void with_reader(Tensor t, F f)
{
    if (t.cols % 8)
        die("%s rows of %d elements; the CUDA back end supports FP8 for multiples of 16",
            format_name(t.format), t.cols);
    if (!format_is_fp8(t.format))
        with_dense_reader(t, f);
    else if (t.format.group == 16)
        f(group_reader(t, t.format.dtype));
    else if (t.format.group == 0)
        f(TensorReader<DType>{ (const uint8_t *)t.data, (const float *)t.scale, t.format.dtype,
                               t.cols });
    else
        die("%s: the CUDA back end reads FP8 rows with a scale per 16 elements or per tensor",
            format_name(t.format));
}
