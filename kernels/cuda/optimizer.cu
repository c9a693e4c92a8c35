/* AdamW in one pass. A thread updates eight elements, or four if w is F32.
 *
 * Bytes per element: w, m and v are read and written, the gradient is read. That is 14 bytes with
 * everything in BF16, 22 with F32 moments and BF16 weights and gradients, and 26 with F32 weights
 * too. */
#include "kernels/cuda/adamw.cuh"

enum { THREADS = 256 };

template <typename TW, typename TM, typename TV, typename TG>
__device__ static inline void update_pack(TW *w, TM *m, TV *v, const TG *grad, const Step &s,
                                          uint64_t number)
{
    const Pack<TW> wp = load_pack((const TW *)w, 8);
    const Pack<TM> mp = load_pack((const TM *)m, 8);
    const Pack<TV> vp = load_pack((const TV *)v, 8);
    const Pack<TG> gp = load_pack(grad, 8);
    float wx[8], mx[8], vx[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        wx[k] = wp[k], mx[k] = mp[k], vx[k] = vp[k];
        update(wx[k], mx[k], vx[k], gp[k], s);
    }
    store_weights(w, wx, s.sequence, number);
    store_pack(m, mx, 8);
    store_pack(v, vx, 8);
}

__device__ static inline float4 load_four(const float *p)
{
    return *reinterpret_cast<const float4 *>(p);
}
__device__ static inline float4 load_four(const bf16 *p)
{
    const uint2 x = *reinterpret_cast<const uint2 *>(p);
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                       __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

__device__ static inline void store_four(float *p, float4 x)
{
    *reinterpret_cast<float4 *>(p) = x;
}
__device__ static inline void store_four(bf16 *p, float4 x)
{
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y),
                         high = __floats2bfloat162_rn(x.z, x.w);
    *reinterpret_cast<uint2 *>(p) = make_uint2(*reinterpret_cast<const uint32_t *>(&low),
                                               *reinterpret_cast<const uint32_t *>(&high));
}

/* NOTE: in a warp's accesses to packs of eight floats, each access has 16 bytes and the next is 32
 * bytes apart. So each access uses half of every sector. For three such arrays, read and written,
 * that costs a fifth of the bandwidth. */
template <typename TM, typename TV, typename TG>
__device__ static inline void update_four(float *w, TM *m, TV *v, const TG *grad, const Step &s)
{
    float4 wx = load_four(w), mx = load_four(m), vx = load_four(v);
    const float4 g = load_four(grad);
    update(wx.x, mx.x, vx.x, g.x, s);
    update(wx.y, mx.y, vx.y, g.y, s);
    update(wx.z, mx.z, vx.z, g.z, s);
    update(wx.w, mx.w, vx.w, g.w, s);
    store_four(w, wx);
    store_four(m, mx);
    store_four(v, vx);
}

/* Number of elements per thread. */
template <typename TW>
constexpr int EACH = sizeof(TW) == sizeof(float) ? 4 : 8;

template <typename TW, typename TM, typename TV, typename TG>
__global__ __launch_bounds__(THREADS) void adamw_kernel(TW *w, TM *m, TV *v, const TG *grad,
                                                        size_t n, Step s, uint64_t first)
{
    const size_t at = EACH<TW> * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= n)
        return;
    if constexpr (EACH<TW> == 4)
        update_four(w + at, m + at, v + at, grad + at, s);
    else
        update_pack(w + at, m + at, v + at, grad + at, s,
                    number_of(first, (unsigned)at, s.a.numbering));
}

void backend_adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_DENSE(w, 1, w.cols);
    CHECK_DENSE(grad, 1, w.cols);
    if (format_is_fp8(m.format) || format_is_fp8(v.format)) {
        adamw_fp8(w, m, v, grad, a, first);
        return;
    }
    CHECK_DENSE(m, 1, w.cols);
    CHECK_DENSE(v, 1, w.cols);
    const size_t n = tensor_numel(w);
    if (n == 0)
        return;
    const Step s = make_step(a);
    check_aligned(OPERATION, w.cols, w, m, v, grad);
    check_numbers(OPERATION, first, a.numbering);
    with_type(w, [&](auto *wp) {
        with_type(m, [&](auto *mp) {
            with_type(v, [&](auto *vp) {
                with_type(grad, [&](auto *gp) {
                    const int each = EACH<std::remove_pointer_t<decltype(wp)>>;
                    const unsigned blocks = (unsigned)ceil_div(n, each * THREADS);
                    adamw_kernel<<<blocks, THREADS, 0, device_stream()>>>(wp, mp, vp, gp, n, s,
                                                                          first);
                });
            });
        });
    });
    LAUNCH_CHECK();
}
