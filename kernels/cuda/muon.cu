/* Muon's elementwise operations. The memory bandwidth limits their speed. */
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/moments.cuh"

struct MomentumStep {
    float momentum, rest, grad_scale; /* rest: 1 - momentum */
    bool nesterov;
};

/* n: number of elements, a multiple of GROUP. Threads after the end store nothing. They recompute
 * the last group, because all threads must call the shuffles. */
template <class F, typename TG>
__global__ __launch_bounds__(THREADS) void momentum_kernel(bf16 *u, Moment m, const TG *grad,
                                                           unsigned n, MomentumStep s)
{
    const unsigned group = (blockIdx.x * THREADS + threadIdx.x) / LANES, last = n / GROUP - 1;
    const unsigned at = min(group, last) * GROUP + threadIdx.x % LANES * 8;
    const bool inside = group <= last;
    Pack<TG> gp[2];
    float mx[2][8], ux[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++)
        gp[h] = load_pack<true>(grad + at + h * HALF, 8);
    decode_moment<F, true>(mx, load_moment<F>(m, at), m.beta);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float g = __fmul_rn(s.rest, __fmul_rn(s.grad_scale, gp[h][i]));
            mx[h][i] = __fadd_rn(mx[h][i], g);
            ux[h][i] = s.nesterov ? __fadd_rn(__fmul_rn(s.momentum, mx[h][i]), g) : mx[h][i];
        }
        if (inside)
            store_pack<true>(u + at + h * HALF, ux[h], 8);
    }
    store_moment<F, true>(m, at, mx, inside);
}

void backend_muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                           float grad_scale)
{
    const int n = u.cols;
    const MomentumStep s = { momentum, 1 - momentum, grad_scale, nesterov };
    const Moment moment = { (uint8_t *)m.data, m.scale,
                            m.format.expand ? log2f(momentum) : momentum };
    const unsigned blocks = (unsigned)ceil_div(n, GROUP / LANES * THREADS);
    check_muon_momentum(u, m, grad);
    if ((format_is_fp8(m.format) && m.format.group != GROUP) || n % GROUP)
        die("muon_momentum: m is %s of %d elements; the CUDA back end needs whole groups of %d",
            format_name(m.format), n, (int)GROUP);
    if (n == 0)
        return;
    const auto run = [&](auto form) {
        with_type(grad, [&](auto *gp) {
            momentum_kernel<decltype(form)><<<blocks, THREADS, 0, device_stream()>>>(
                (bf16 *)u.data, moment, gp, (unsigned)n, s);
        });
    };
    if (format_is_fp8(m.format))
        with_fp8_form(m, run);
    else
        with_dense_form(m, run);
    LAUNCH_CHECK();
}

/* Returns true if t can be accessed eight elements at a time. */
static bool in_packs(Tensor t, size_t n)
{
    return n % 8 == 0 && (uintptr_t)t.data % 16 == 0;
}

template <bool ALIGNED>
__global__ __launch_bounds__(THREADS) void normalize_kernel(bf16 *y, const bf16 *x, size_t n,
                                                            const float *squares, float eps)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= n)
        return;
    const int left = n - at < 8 ? (int)(n - at) : 8;
    const float norm = __bfloat162float(__float2bfloat16_rn(fmaxf(__fsqrt_rn(*squares), eps)));
    const Pack<bf16> p = load_pack<ALIGNED>(x + at, left);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = __fdiv_rn(p[i], norm);
    store_pack<ALIGNED>(y + at, v, left);
}

void backend_muon_normalize(Tensor y, Tensor x, const float *squares, float eps)
{
    const size_t n = tensor_numel(x);
    check_muon_normalize(y, x);
    if (n == 0)
        return;
    with_bool(in_packs(x, n) && in_packs(y, n), [&](auto aligned) {
        normalize_kernel<aligned>
            <<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0, device_stream()>>>(
                (bf16 *)y.data, (const bf16 *)x.data, n, squares, eps);
    });
    LAUNCH_CHECK();
}

__device__ static inline void store_one(float *w, float x, uint64_t, uint64_t)
{
    *w = x;
}
__device__ static inline void store_one(bf16 *w, float x, uint64_t sequence, uint64_t i)
{
    *(uint16_t *)w = bf16_round_stochastic(x, random_16_of(sequence, i));
}

template <bool ALIGNED, typename T>
__global__ __launch_bounds__(THREADS) void apply_kernel(T *w, const bf16 *x, size_t n, float keep,
                                                        float rate, uint64_t sequence,
                                                        uint64_t first)
{
    const size_t at = 8 * ((size_t)blockIdx.x * THREADS + threadIdx.x);
    if (at >= n)
        return;
    const int left = n - at < 8 ? (int)(n - at) : 8;
    const Pack<T> wp = load_pack<ALIGNED>((const T *)w + at, left);
    const Pack<bf16> xp = load_pack<ALIGNED>(x + at, left);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = __fsub_rn(__fmul_rn(keep, wp[i]), __fmul_rn(rate, xp[i]));
    if constexpr (ALIGNED)
        store_weights(w + at, v, sequence, first + at);
    else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < left)
                store_one(w + at + i, v[i], sequence, first + at + i);
}

void backend_muon_apply(Tensor w, Tensor x, float keep, float rate, uint64_t seed, uint64_t first)
{
    const size_t n = tensor_numel(w);
    check_muon_apply(w, x);
    if (n == 0)
        return;
    with_bool(in_packs(w, n) && in_packs(x, n) && first % 4 == 0, [&](auto aligned) {
        with_type(w, [&](auto *wp) {
            apply_kernel<aligned>
                <<<(unsigned)ceil_div(n, 8 * THREADS), THREADS, 0, device_stream()>>>(
                    wp, (const bf16 *)x.data, n, keep, rate, random_sequence(seed), first);
        });
    });
    LAUNCH_CHECK();
}
