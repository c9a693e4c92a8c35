/* Search for values that weights and moments may not have, in one pass over the bytes. */
#include "kernels/cuda/fp8.cuh"

enum { THREADS = 256, BLOCKS_PER_SM = 8 };

/* Sets *found to 1 if the bits of a number include all bits of `special`, or exceed `last`. To find
 * numbers below zero, `last` is the sign bit alone, the bits of -0, because the bits of all numbers
 * below zero are larger. Threads read sixteen bytes at a time, except before the first and after
 * the last aligned sixteen bytes. */
template <typename U>
__global__ __launch_bounds__(THREADS) void bits_kernel(int *found, const U *x, size_t n, U special,
                                                       U last)
{
    constexpr int WIDTH = 8 * sizeof(U), COUNT = 16 / sizeof(U);
    const size_t before = min(n, (size_t)(-(uintptr_t)x % 16 / sizeof(U))),
                 packs = (n - before) / COUNT;
    const size_t thread = (size_t)blockIdx.x * THREADS + threadIdx.x,
                 threads = (size_t)gridDim.x * THREADS;
    const uint4 *pack = reinterpret_cast<const uint4 *>(x + before);
    bool bad = false;
#pragma unroll 4
    for (size_t i = thread; i < packs; i += threads) {
        const uint4 v = pack[i];
        const uint32_t word[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const U u = (U)(word[k * WIDTH / 32] >> k * WIDTH % 32);
            bad |= (u & special) == special || u > last;
        }
    }
    for (size_t i = thread; i < n - packs * COUNT; i += threads) {
        const U u = x[i < before ? i : i + packs * COUNT];
        bad |= (u & special) == special || u > last;
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0)
        *found = 1;
}

typedef enum { FLOAT_SCALES, BF16_SCALES, PAIR_SCALES } ScaleKind;

__global__ __launch_bounds__(THREADS) void scales_kernel(int *found, const void *scale, size_t n,
                                                         ScaleKind kind, float largest)
{
    bool bad = false;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS) {
        const uint32_t bits = kind == BF16_SCALES ? (uint32_t)((const uint16_t *)scale)[i] << 16
                                                  : ((const uint32_t *)scale)[i];
        const float top =
            __uint_as_float(kind == PAIR_SCALES ? (bits & 0xffffff) << 7 : bits) * largest;
        bad |= !(top >= 0) || isinf(top);
    }
    if (__syncthreads_or(bad) && threadIdx.x == 0)
        *found = 1;
}

static unsigned blocks_for(size_t threads)
{
    const size_t needed = ceil_div(threads, THREADS),
                 most = (size_t)BLOCKS_PER_SM * device_sm_count();
    return (unsigned)(needed < 1 ? 1 : needed < most ? needed : most);
}

template <typename U>
static void look(int *found, Tensor x, U special, bool negative)
{
    const U all = (U) ~(U)0, sign = (U)((U)1 << (8 * sizeof(U) - 1));
    const size_t n = tensor_numel(x);
    bits_kernel<U><<<blocks_for(ceil_div(n, 16 / sizeof(U))), THREADS, 0, device_stream()>>>(
        found, (const U *)x.data, n, special, negative ? sign : all);
    LAUNCH_CHECK();
}

static void look_at_scales(int *found, Tensor x)
{
    const size_t n = x.format.group ? tensor_numel(x) / x.format.group : 1;
    const bool floats = !x.format.group || format_is_dynamic8(x.format);
    const ScaleKind kind = floats ? FLOAT_SCALES : x.format.expand ? PAIR_SCALES : BF16_SCALES;
    scales_kernel<<<blocks_for(n), THREADS, 0, device_stream()>>>(
        found, x.scale, n, kind, format_is_fp8(x.format) ? fp8_max(x.format.dtype) : 1);
    LAUNCH_CHECK();
}

void backend_find_not_finite(int *found, Tensor x, bool negative)
{
    check_find_not_finite(x, negative);
    switch (x.format.dtype) {
    case F32: look<uint32_t>(found, x, 0x7f800000u, negative); break;
    case BF16: look<uint16_t>(found, x, 0x7f80, negative); break;
    case E4M3: look<uint8_t>(found, x, 0x7f, negative); break;
    case E5M2: look<uint8_t>(found, x, 0x7c, negative); break;
    default: break; /* all values of the dynamic maps are finite */
    }
    if (format_has_scales(x.format))
        look_at_scales(found, x);
}
