/* Definitions that elementwise and row-wise kernels share: access to eight consecutive elements at
 * a time, checks, choice of instantiation.
 *
 * A thread's unit of work is a Pack, eight neighbours of a row in any format: one 16-byte access
 * for BF16, two for F32. The formats of large inputs are template parameters, so that a thread
 * starts all its loads before it waits for one. The formats of outputs and of small inputs (norm
 * weights) are chosen by a branch that all threads take alike. ALIGNED is false for logits and
 * halves of heads that do not begin at multiples of 16 bytes; then elements move one by one. */
#pragma once
#include <type_traits>

#include "kernels/cuda/cuda.h"

/* ---- packs ----------------------------------------------------------------------------------- */

/* Eight elements, kept as loaded. A BF16 pack takes four registers. The low half of a word is the
 * first of its two elements. */
template <typename T>
struct Pack {
    uint32_t word[2 * sizeof(T)];
    __device__ float operator[](int i) const;
};

template <>
__device__ inline float Pack<float>::operator[](int i) const
{
    return __uint_as_float(word[i]);
}
template <>
__device__ inline float Pack<bf16>::operator[](int i) const
{
    return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
}

/* NOTE: needed for rows that are held during a reduction. Without this function the compiler
 * unpacks these rows once and keeps floats, in twice the registers. */
template <typename T, int K>
__device__ inline void keep_packed(Pack<T> (&packs)[K])
{
#pragma unroll
    for (int j = 0; j < K; j++)
#pragma unroll
        for (size_t k = 0; k < 2 * sizeof(T); k++)
            asm volatile("" : "+r"(packs[j].word[k]));
}

__device__ inline Pack<float> make_pack(const float (&x)[8], float)
{
    Pack<float> p;
#pragma unroll
    for (int i = 0; i < 8; i++)
        p.word[i] = __float_as_uint(x[i]);
    return p;
}

__device__ inline Pack<bf16> make_pack(const float (&x)[8], bf16)
{
    Pack<bf16> p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        p.word[i] = *reinterpret_cast<const uint32_t *>(&two);
    }
    return p;
}

__device__ inline uint32_t element_bits(const float *p)
{
    return __float_as_uint(*p);
}
__device__ inline uint32_t element_bits(const bf16 *p)
{
    return __bfloat16_as_ushort(*p);
}

/* Loads elements p[0 .. left), at most eight. The other elements are 0. If ALIGNED, left must not
 * be between 1 and 7. */
template <bool ALIGNED = true, typename T>
__device__ inline Pack<T> load_pack(const T *p, int left)
{
    Pack<T> pack = {};
    if (ALIGNED) {
        if (left > 0)
#pragma unroll
            for (size_t k = 0; k < sizeof(T) / 2; k++) {
                const uint4 v = reinterpret_cast<const uint4 *>(p)[k];
                pack.word[4 * k] = v.x, pack.word[4 * k + 1] = v.y;
                pack.word[4 * k + 2] = v.z, pack.word[4 * k + 3] = v.w;
            }
    } else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < left)
                pack.word[i * sizeof(T) / 4] |= element_bits(p + i)
                                                << (sizeof(T) == 2 && i % 2 ? 16 : 0);
    return pack;
}

template <bool ALIGNED = true, typename T>
__device__ inline void store_pack(T *p, const float (&x)[8], int left)
{
    if (ALIGNED) {
        const Pack<T> pack = make_pack(x, T());
        if (left > 0)
#pragma unroll
            for (size_t k = 0; k < sizeof(T) / 2; k++)
                reinterpret_cast<uint4 *>(p)[k] =
                    make_uint4(pack.word[4 * k], pack.word[4 * k + 1], pack.word[4 * k + 2],
                               pack.word[4 * k + 3]);
    } else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < left)
                p[i] = from_float<T>(x[i]);
}

/* Prefetches `bytes` bytes from p on to the L2 cache. Both must be multiples of 16. Before compute
 * capability 9.0 an instruction prefetches one line, not a row; there this function does
 * nothing. */
__device__ static inline void prefetch(const void *p, size_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"((unsigned)bytes));
#endif
}

/* ---- F32 or BF16, as a run-time argument ----------------------------------------------------- */

struct AnyIn {
    const void *data;
    bool is_f32;
};
struct AnyOut {
    void *data;
    bool is_f32;
};

static inline AnyIn any_in(Tensor t)
{
    return { t.data, t.format.dtype == F32 };
}
static inline AnyOut any_out(Tensor t)
{
    return { t.data, t.format.dtype == F32 };
}

template <bool ALIGNED = true>
__device__ inline void load_any(float (&x)[8], AnyIn in, size_t at, int left)
{
    if (in.is_f32) {
        const Pack<float> p = load_pack<ALIGNED>((const float *)in.data + at, left);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = p[i];
    } else {
        const Pack<bf16> p = load_pack<ALIGNED>((const bf16 *)in.data + at, left);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = p[i];
    }
}

template <bool ALIGNED = true>
__device__ inline void store_any(AnyOut out, size_t at, const float (&x)[8], int left)
{
    if (out.is_f32)
        store_pack<ALIGNED>((float *)out.data + at, x, left);
    else
        store_pack<ALIGNED>((bf16 *)out.data + at, x, left);
}

__device__ inline float round_as(AnyOut out, float x)
{
    return out.is_f32 ? x : to_float(from_float<bf16>(x));
}

/* Returns element i of a pack, rounded to the format of `stored`. stored.data NULL: the pack was
 * loaded from memory in this format, so it is not rounded again. */
template <typename T>
__device__ inline float as_stored(AnyOut stored, const Pack<T> &pack, int i)
{
    return sizeof(T) == sizeof(float) && stored.data ? round_as(stored, pack[i]) : pack[i];
}

/* ---- reductions ------------------------------------------------------------------------------ */

/* sum[c] += partial[0][c] + partial[1][c] + ..., in F64, for sum.cols columns. `partial` has `rows`
 * rows, which are `stride` floats apart. */
/* reduce.cu */
void add_column_sums(Tensor sum, const float *partial, int rows, size_t stride);

/* ---- special functions ----------------------------------------------------------------------- */

/* The hardware's approximations of log2 x, 2^x, sqrt x and 1/x. Their relative error is within
 * 2^-22 [PTX ISA]; near x = 1 this bound holds for the absolute error of log2. Numbers below 2^-126
 * count as 0. */
#define QUICK(name, instruction) \
    __device__ static inline float name(float x) \
    { \
        float y; \
        asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
        return y; \
    }
QUICK(log2_quick, "lg2.approx.ftz.f32")
QUICK(exp2_quick, "ex2.approx.ftz.f32")
QUICK(sqrt_quick, "sqrt.approx.ftz.f32")
QUICK(inverse_quick, "rcp.approx.ftz.f32")
#undef QUICK

/* NOTE: an exact division branches for rare exponents and doubles the instructions. This division
 * has an error of at most 2 ulp, and gives 0 for results below 2^-126. */
__device__ inline float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + expf(-x));
}

/* Computes the sigmoid with the hardware's exponential and reciprocal. The error is a few 2^-22,
 * far below half a code of FP8. NOTE: __expf and __fdividef scale their arguments to keep numbers
 * below 2^-126, which takes twice the instructions. */
__device__ static inline float quick_sigmoid(float x)
{
    return inverse_quick(1.0f + exp2_quick(x * -1.44269504f));
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Returns the number of threads of a block that moves `packs` packs with `each` packs per
 * thread. */
static inline int block_threads(int packs, int each, int most)
{
    int threads = (int)ceil_div(ceil_div(packs, each), 32) * 32;
    return threads < most ? threads : most;
}

/* As block_threads, for a block that loops several times. Returns no more threads than its last
 * iteration can use. */
static inline int round_threads(int packs, int each, int most)
{
    const int rounds = (int)ceil_div(packs, each * most);
    return block_threads((int)ceil_div(packs, rounds), each, most);
}

/* Returns true if t is absent, or if its rows of width cols can be accessed 16 bytes at a time. */
static inline bool is_aligned(Tensor t, int cols)
{
    return !t.data || (cols % 8 == 0 && (uintptr_t)t.data % 16 == 0);
}

template <class... Tensors>
static inline void check_aligned(const char *operation, int cols, Tensors... t)
{
    if (!(is_aligned(t, cols) && ...))
        die("%s: rows of %d elements; expected a multiple of 8, and tensors aligned to 16 bytes",
            operation, cols);
}

/* Calls f(pointer to t's elements). t is F32 or BF16. */
template <typename F>
static inline void with_type(Tensor t, F f)
{
    if (t.format.dtype == F32)
        f((float *)t.data);
    else
        f((bf16 *)t.data);
}

/* Calls f(std::true_type) or f(std::false_type). */
template <typename F>
static inline void with_bool(bool b, F f)
{
    if (b)
        f(std::true_type());
    else
        f(std::false_type());
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Dies unless t exists, is F32 or BF16 and has this shape. */
static inline void check_dense(const char *op, const char *name, Tensor t, int rows, int cols)
{
    check_tensor(op, name, t, rows, cols);
    if (format_has_scales(t.format))
        die("%s: %s is %s; the CUDA back end has f32 and bf16 here", op, name,
            format_name(t.format));
}

static inline void check_dense_optional(const char *op, const char *name, Tensor t, int rows,
                                        int cols)
{
    if (tensor_exists(t))
        check_dense(op, name, t, rows, cols);
}

#define CHECK_DENSE(t, rows, cols) check_dense(OPERATION, #t, t, rows, cols)
#define CHECK_DENSE_OPTIONAL(t, rows, cols) check_dense_optional(OPERATION, #t, t, rows, cols)
