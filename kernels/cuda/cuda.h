/* Declarations that the files of the CUDA back end share: checks, the stream, scratch memory,
 * reductions.
 *
 * .c files (host code, compiled as C) and .cu files (C++17) include this header. CUDA types stay
 * inside kernels/cuda. Everything is queued on device_stream(). A function waits for the device
 * only if its comment says so. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <cuda_bf16.h>
#define _Noreturn [[noreturn]]
extern "C" {
#endif
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/check_experts.h"
#include "kernels/collectives.h"
#include "kernels/kernels.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"

/* Ends the program if a CUDA runtime call fails. The error may stem from an earlier kernel. */
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

/* Follows every <<<>>>: dies if the launch failed. With CFLAGS=-DDEBUG it also waits for the
 * kernel, so that a fault is reported at the kernel that caused it. */
#define LAUNCH_CHECK() cuda_check_launch(__FILE__, __LINE__)

void cuda_check(cudaError_t status, const char *call, const char *file, int line);
void cuda_check_launch(const char *file, int line);

cudaStream_t device_stream(void); /* stream of the current queue */
int device_sm_count(void);
bool device_is_pinned(const void *p); /* true if p is in an allocation of device_host_alloc */

/* Scratch memory for use inside one operation: at least `bytes` bytes, 256-byte aligned, with
 * undefined contents. A slot only grows, and growing waits for the device. An operation that needs
 * two buffers at the same time uses two slots. */
enum {
    SCRATCH_GEMM,          /* cuBLASLt's workspace */
    SCRATCH_ATTENTION_OWN, /* attention's workspace */
    SCRATCH_DOCUMENTS,     /* document tables of attention */
    SCRATCH_0,             /* elementwise kernels */
    SCRATCH_1,
    SCRATCH_AMAX, /* running maxima of FP8 tensors */
    SCRATCH_SLOTS
};
void *device_scratch(size_t bytes, int slot);

/* Scratch memory for attention: a.scratch if it is large enough, else a slot of device_scratch. */
void *attention_scratch(Attention a, size_t bytes);

/* image.cu. image_found returns true if this program has code for the current device, or PTX that
 * the driver can compile for it. image_architectures lists the GPUs that the program was built for,
 * as in make's ARCH. */
bool image_found(void);
const char *image_architectures(void);
/* Returns true if hopper.cuh can be used: on compute capability 9.0, in programs compiled for
 * "90a". */
bool runs_on_hopper(void);

/* matmul_row.cu: matmul of a single BF16 row with a BF16 w. The caller has checked the arguments.
 * Returns false, without doing anything, if the kernel does not support them. */
bool matmul_row(Tensor y, Tensor x, Tensor w, Tensor add);

/* matmul.c: computes blocks (size, size) of y = alpha x xT + beta add, or of y = alpha xT x + beta
 * add if `columns`. The first block is at (row, col). Each of the `count` blocks begins `step` rows
 * and columns after the previous block. */
typedef struct {
    int size, row, col, count, step;
} SquareBlocks;
void multiply_blocks(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta,
                     SquareBlocks b);

/* channels.cu: multiply or divide x, F32 or BF16, by the factors of its columns. The factors are
 * powers of two, so the results are exact. */
void channels_multiply(Tensor x, const float *channel);
void channels_divide(Tensor x, const float *channel);

/* bias.cu: sets every row of y (N,O) to bias (O,1). Both are F32. */
void fill_rows(Tensor y, Tensor bias);

static inline size_t ceil_div(size_t n, size_t by)
{
    return (n + by - 1) / by;
}

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

/* ---- element types --------------------------------------------------------------------------- */

typedef __nv_bfloat16 bf16;

__device__ inline float to_float(float x)
{
    return x;
}
__device__ inline float to_float(bf16 x)
{
    return __bfloat162float(x);
}

template <typename T>
__device__ inline T from_float(float x); /* rounds to nearest even */
template <>
__device__ inline float from_float<float>(float x)
{
    return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* Computes 2^x with a relative error below 2^-22. */
__device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns an address in shared memory as PTX instructions expect it. */
__device__ inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Returns two numbers, rounded to BF16, in one word. */
__device__ inline uint32_t bf16_pair(float low, float high)
{
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&two);
}

/* ---- reductions, always in the same order ---------------------------------------------------- */

/* Reduction operators and their neutral elements. */
struct Sum {
    template <typename T>
    __device__ static T of(T a, T b)
    {
        return a + b;
    }
    template <typename T>
    static constexpr T NONE = 0;
};
struct Max {
    __device__ static float of(float a, float b)
    {
        return fmaxf(a, b);
    }
    template <typename T>
    static constexpr T NONE = -INFINITY;
};

/* Reduces over the warp. The result is in every lane. */
template <class Op, typename T>
__device__ inline T warp_reduce(T x)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
        x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* Computes K reductions at once. The results are in every thread. All threads of the block must
 * call this function, and blockDim.x must be a multiple of 32. `shared` is 32 K numbers of shared
 * memory, which the caller may reuse when the call returns. */
template <class Op, typename T, int K>
__device__ inline void block_reduce(T (&x)[K], T *shared)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = warp_reduce<Op>(x[k]);
        if (lane == 0)
            shared[32 * k + warp] = x[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++)
        x[k] = warp_reduce<Op>(lane < warps ? shared[32 * k + lane] : Op::template NONE<T>);
    __syncthreads();
}

template <class Op, typename T>
__device__ inline T block_reduce(T x, T *shared)
{
    T one[1] = { x };
    block_reduce<Op>(one, shared);
    return one[0];
}

__device__ inline float warp_sum(float x)
{
    return warp_reduce<Sum>(x);
}
__device__ inline float warp_max(float x)
{
    return warp_reduce<Max>(x);
}
__device__ inline float block_sum(float x, float *shared)
{
    return block_reduce<Sum>(x, shared);
}
__device__ inline float block_max(float x, float *shared)
{
    return block_reduce<Max>(x, shared);
}
template <int K>
__device__ inline void block_sums(float (&x)[K], float *shared)
{
    block_reduce<Sum>(x, shared);
}

#endif
