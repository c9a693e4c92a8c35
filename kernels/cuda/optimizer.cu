/* AdamW in one pass: a thread reads eight elements of w, m, v and the gradient, and writes the first three; four if w is F32.
 *
 * Bytes per element: twice those of w, m and v, and once those of the gradient: 14 with everything in BF16, 22 with
 * F32 moments and BF16 weights and gradients, 26 with F32 weights too.
 */
#include "kernels/cuda/adamw.cuh"

enum { THREADS = 256 };

template <bool ALIGNED, typename TW, typename TM, typename TV, typename TG>
__device__ static inline void update_pack(TW *w, TM *m, TV *v, const TG *grad, int left, const Step &s,
                                          uint64_t number)
{
    const Pack<TW> wp = load_pack<ALIGNED>((const TW *)w, left);
    const Pack<TM> mp = load_pack<ALIGNED>((const TM *)m, left);
    const Pack<TV> vp = load_pack<ALIGNED>((const TV *)v, left);
    const Pack<TG> gp = load_pack<ALIGNED>(grad, left);
    float wx[8], mx[8], vx[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        wx[k] = wp[k], mx[k] = mp[k], vx[k] = vp[k];
        update(wx[k], mx[k], vx[k], gp[k], s);
    }
    store_weights<ALIGNED>(w, wx, left, s.sequence, number);
    store_pack<ALIGNED>(m, mx, left);
    store_pack<ALIGNED>(v, vx, left);
}

__device__ static inline float4 load_four(const float *p) { return *reinterpret_cast<const float4 *>(p); }
__device__ static inline float4 load_four(const bf16 *p)
{
    const uint2 x = *reinterpret_cast<const uint2 *>(p);
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                       __uint_as_float(x.y & 0xffff0000u));
}

__device__ static inline void store_four(float *p, float4 x) { *reinterpret_cast<float4 *>(p) = x; }
__device__ static inline void store_four(bf16 *p, float4 x)
{
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
    *reinterpret_cast<uint2 *>(p) = make_uint2(*reinterpret_cast<const uint32_t *>(&low),
                                               *reinterpret_cast<const uint32_t *>(&high));
}

/* NOTE: a warp's accesses to packs of eight floats are 16 bytes, 32 apart: each touches half of every sector. With three such
 * arrays, read and written, that cost a fifth of the bandwidth. */
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

/* Elements of a thread. */
template <bool ALIGNED, typename TW> __host__ __device__ constexpr int each()
{
    return ALIGNED && sizeof(TW) == sizeof(float) ? 4 : 8;
}

template <bool ALIGNED, typename TW, typename TM, typename TV, typename TG> __global__ __launch_bounds__(THREADS)
void adamw_kernel(TW *w, TM *m, TV *v, const TG *grad, size_t n, Step s, uint64_t first)
{
    constexpr int EACH = each<ALIGNED, TW>();
    const size_t at = EACH * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (ALIGNED && at + EACH <= n) {
        if constexpr (EACH == 4)
            update_four(w + at, m + at, v + at, grad + at, s);
        else
            update_pack<true>(w + at, m + at, v + at, grad + at, 8, s, first + at);
    } else if (at < n)
        update_pack<false>(w + at, m + at, v + at, grad + at, (int)min(n - at, (size_t)EACH), s, first + at);
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
    const bool aligned = is_aligned(w, 8) && is_aligned(m, 8) && is_aligned(v, 8) && is_aligned(grad, 8)
                         && first % 4 == 0;
    with_bool(aligned, [&](auto is_aligned) {
        with_type(w, [&](auto *wp) {
            with_type(m, [&](auto *mp) {
                with_type(v, [&](auto *vp) {
                    with_type(grad, [&](auto *gp) {
                        constexpr bool ALIGNED = decltype(is_aligned)::value;
                        const int EACH = each<ALIGNED, std::remove_pointer_t<decltype(wp)>>();
                        const unsigned blocks = (unsigned)ceil_div(n, EACH * THREADS);
                        adamw_kernel<ALIGNED><<<blocks, THREADS, 0, device_stream()>>>(
                            wp, mp, vp, gp, n, s, first);
                    });
                });
            });
        });
    });
    LAUNCH_CHECK();
}
