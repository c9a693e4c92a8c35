/* AdamW in one pass: a thread reads eight elements of w, m, v and the gradient, and writes the first three.
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

template <bool ALIGNED, typename TW, typename TM, typename TV, typename TG> __global__ __launch_bounds__(THREADS)
void adamw_kernel(TW *w, TM *m, TV *v, const TG *grad, size_t n, Step s, uint64_t first)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (ALIGNED && at + 8 <= n)
        update_pack<true>(w + at, m + at, v + at, grad + at, 8, s, first + at);
    else if (at < n)
        update_pack<false>(w + at, m + at, v + at, grad + at, (int)min(n - at, (size_t)8), s, first + at);
}

void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_DENSE(w, 1, w.cols);
    CHECK_DENSE(grad, 1, w.cols);
    if (format_is_fp8(m.format) && format_is_fp8(v.format)) {
        adamw_fp8(w, m, v, grad, a, first);
        return;
    }
    CHECK_DENSE(m, 1, w.cols);
    CHECK_DENSE(v, 1, w.cols);
    const size_t n = tensor_numel(w);
    if (n == 0)
        return;
    const unsigned blocks = (unsigned)ceil_div(n, 8 * THREADS);
    const Step s = make_step(a);
    const bool aligned = is_aligned(w, 8) && is_aligned(m, 8) && is_aligned(v, 8) && is_aligned(grad, 8)
                         && first % 4 == 0;
    with_bool(aligned, [&](auto is_aligned) {
        with_type(w, [&](auto *wp) {
            with_type(m, [&](auto *mp) {
                with_type(v, [&](auto *vp) {
                    with_type(grad, [&](auto *gp) {
                        adamw_kernel<decltype(is_aligned)::value><<<blocks, THREADS, 0, device_stream()>>>(
                            wp, mp, vp, gp, n, s, first);
                    });
                });
            });
        });
    });
    LAUNCH_CHECK();
}
