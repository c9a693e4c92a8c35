#pragma once
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __global__
#define __global__
namespace emu {
struct Idx { unsigned x, y, z; };
extern thread_local Idx tid, bid; extern Idx bdim, gdim;
extern char *dyn;
struct Cfg { dim3 grid; dim3 block; size_t bytes; };
static inline Cfg cfg(dim3 g, dim3 b, size_t bytes, cudaStream_t) { return { g, b, bytes }; }
void run(const char *name, Cfg c, const std::function<void()> &f);
uint64_t exchange(uint64_t v, int from, const char *what);   /* value of the lane `from` of this warp */
void block_barrier();
void warp_gather(uint64_t v, uint64_t (&all)[32], const char *what);
}
#define threadIdx emu::tid
#define blockIdx emu::bid
#define blockDim emu::bdim
#define gridDim emu::gdim
static inline void __syncthreads() { emu::block_barrier(); }
static inline void __syncwarp() { uint64_t a[32]; emu::warp_gather(0, a, "syncwarp"); }
template <typename T> static inline T __shfl_xor_sync(unsigned, T v, int o) {
    uint64_t u = 0; memcpy(&u, &v, sizeof v);
    u = emu::exchange(u, (emu::tid.x % 32) ^ o, "shfl_xor"); memcpy(&v, &u, sizeof v); return v; }
template <typename T> static inline T __shfl_sync(unsigned, T v, int o) {
    uint64_t u = 0; memcpy(&u, &v, sizeof v);
    u = emu::exchange(u, o & 31, "shfl"); memcpy(&v, &u, sizeof v); return v; }
static inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    uint64_t a[32]; emu::warp_gather(v, a, "reduce_max"); unsigned m = 0; for (int i = 0; i < 32; i++) if (a[i] > m) m = (unsigned)a[i]; return m; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int __float2int_rn(float x) { return (int)lrintf(x); }
static inline uint32_t __float_as_uint(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(uint32_t x) { float u; memcpy(&u, &x, 4); return u; }
static inline float __int_as_float(int x) { float u; memcpy(&u, &x, 4); return u; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
    uint64_t v = (uint64_t)b << 32 | a; uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (uint32_t)(v >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i; return r; }
static inline int atomicMax(int *p, int v) { int o = *p; if (v > o) *p = v; return o; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline size_t min(size_t a, size_t b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline size_t max(size_t a, size_t b) { return a > b ? a : b; }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline unsigned __ballot_sync(unsigned, int p) { uint64_t a[32]; emu::warp_gather(p != 0, a, "ballot"); unsigned m = 0; for (int i = 0; i < 32; i++) m |= (unsigned)a[i] << i; return m; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }
/* approximations: off by a chosen number of ulps */
extern int emu_ulps;
static inline float emu_off(float y) { if (!emu_ulps || !std::isfinite(y) || y == 0) return y;
    uint32_t u = __float_as_uint(y) + emu_ulps; return __uint_as_float(u); }
static inline float emu_ftz(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline float log2_quick(float x) { return emu_ftz(log2f(emu_ftz(x))); }
static inline float exp2_quick(float x) { return emu_ftz(exp2f(emu_ftz(x))); }
static inline float sqrt_quick(float x) { return sqrtf(emu_ftz(x)); }
static inline float inverse_quick(float x) { return emu_ftz(emu_off(1.0f / emu_ftz(x))); }
void emu_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
