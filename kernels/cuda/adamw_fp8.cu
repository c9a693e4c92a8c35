/* AdamW with FP8 moments in groups of 128 [COAT sec. 4]: decode, update and encode in registers, in one pass.
 *
 * Sixteen threads share a group, eight elements each: maximum and minimum of the new moments by shuffles. Bytes per
 * element with BF16 weights and gradients: 2 + 2 + 2 and four codes, and 1/16 for the scales: 10.06.
 * Rounding: powers are 2^(k log2 x) on the hardware's approximations, a few 2^-22 off in the exponent, as are the root
 * and the quotient; a code may be the neighbour of the specification's where a value lies that close to the middle
 * between two. NOTE: exact functions make this kernel twice as slow: instructions, not memory, are its limit. */
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/tiles.cuh"

enum { GROUP = 128, LANES = GROUP / 8, MAX_K = 16, K_STEPS = 16 };

struct Moment {
    uint8_t *codes;
    uint16_t *scale;        /* per group: S, or S and k with expansion */
    DType dtype;
    bool expand;
};

__device__ static inline float log2_quick(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float exp2_quick(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float sqrt_quick(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline float fp8_log2_max(DType d)
{
    return d == E4M3 ? 8.8073549f : 15.8073549f;
}

/* x = sign(f) (|f|/max)^(1/k) a with f the value of a code. A code 0 has logarithm -inf and gives 0. */
template <bool SIGNED> __device__ static inline void load_moment(float (&x)[8], const Moment &t, size_t at)
{
    const uint2 codes = *(const uint2 *)(t.codes + at);
    if (!t.expand) {
        decode_pack(x, codes, bf16_value(t.scale[at / GROUP]), t.dtype);
        return;
    }
    const uint32_t pair = ((const uint32_t *)t.scale)[at / GROUP];
    const float root = __fdividef(1.0f, bf16_value((uint16_t)(pair >> 16)));
    const float shift = log2_quick(bf16_value((uint16_t)pair)) + (1.0f - root) * fp8_log2_max(t.dtype);
    decode_pack(x, codes, 1.0f, t.dtype);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float y = exp2_quick(__fmaf_rn(root, log2_quick(fabsf(x[i])), shift));
        x[i] = SIGNED ? copysignf(y, x[i]) : y;
    }
}

/* k of a group whose absolute values lie between b and a: a multiple of 1/16 that stretches them to the format's range. */
__device__ static inline float expansion_power(float a, float b, DType d)
{
    const float tiny = 1e-20f, ratio = log2_quick(__fdividef(a + tiny, b + tiny)), range = 2 * fp8_log2_max(d) - 1;
    const float steps = ratio > 0 ? floorf(__fdividef(range * K_STEPS, ratio)) : (float)(MAX_K * K_STEPS);
    return fminf(fmaxf(steps, 1), MAX_K * K_STEPS) * (1.0f / K_STEPS);
}

__device__ static inline float group_max(float x)
{
#pragma unroll
    for (int o = LANES / 2; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* f = sign(x) (|x|/a)^k max, a = S max. */
template <bool SIGNED>
__device__ static inline void store_moment(const Moment &t, size_t at, float (&x)[8], bool inside)
{
    const float a = group_max(pack_abs_max(x));
    const uint16_t s = fp8_group_scale(a, t.dtype);
    const bool leader = threadIdx.x % LANES == 0 && inside;
    if (!t.expand) {
        if (leader)
            t.scale[at / GROUP] = s;
        if (inside)
            *(uint2 *)(t.codes + at) = encode_pack(x, 1.0f / bf16_value(s), t.dtype);
        return;
    }
    float b = INFINITY;
#pragma unroll
    for (int i = 0; i < 8; i++)
        b = fminf(b, fabsf(x[i]));
    b = -group_max(-b);
    const float k = expansion_power(a, b, t.dtype);
    const float shift = (1.0f - k) * fp8_log2_max(t.dtype) - k * log2_quick(bf16_value(s));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float y = exp2_quick(__fmaf_rn(k, log2_quick(fabsf(x[i])), shift));
        x[i] = SIGNED ? copysignf(y, x[i]) : y;
    }
    if (leader)
        ((uint32_t *)t.scale)[at / GROUP] = s | __float_as_uint(k) >> 16 << 16;
    if (inside)
        *(uint2 *)(t.codes + at) = encode_pack(x, 1.0f, t.dtype);
}

__device__ static inline void update_quick(float &w, float &m, float &v, float grad, const Step &s)
{
    const float g = s.a.grad_scale * grad;
    m = s.a.beta1 * m + s.rest1 * g;
    v = s.a.beta2 * v + s.rest2 * g * g;
    const float ratio = __fdividef(m * s.inverse1, sqrt_quick(v * s.inverse2) + s.a.eps);
    w -= s.a.lr * (ratio + s.a.weight_decay * w);
}

template <typename TW, typename TG> __global__ __launch_bounds__(256)
void adamw_fp8_kernel(TW *w, Moment m, Moment v, const TG *grad, size_t n, Step s, uint64_t first)
{
    const size_t at = 8 * ((size_t)blockIdx.x * 256 + threadIdx.x);
    const bool inside = at < n;         /* whole groups: all threads of one agree */
    float wx[8], mx[8] = {}, vx[8] = {};
    if (inside) {
        const Pack<TW> wp = load_pack<true>((const TW *)w + at, 8);
        const Pack<TG> gp = load_pack<true>(grad + at, 8);
        load_moment<true>(mx, m, at);
        load_moment<false>(vx, v, at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            wx[i] = wp[i];
            update_quick(wx[i], mx[i], vx[i], gp[i], s);
        }
        store_weights<true>(w + at, wx, 8, s.a.seed, first + at);
    }
    store_moment<true>(m, at, mx, inside);
    store_moment<false>(v, at, vx, inside);
}

static Moment moment(const char *name, Tensor t, int n)
{
    if (!format_is_fp8(t.format) || t.format.group != GROUP || n % GROUP)
        die("adamw: %s is %s of %d elements; the CUDA back end has FP8 moments in whole groups of %d, both of them", name,
            format_name(t.format), n, (int)GROUP);
    return { (uint8_t *)t.data, (uint16_t *)t.scale, t.format.dtype, t.format.expand };
}

void adamw_fp8(Tensor w, Tensor m, Tensor v, Tensor grad, const Step &s, uint64_t first)
{
    const int n = w.cols;
    const Moment m1 = moment("m", m, n), m2 = moment("v", v, n);
    with_type(w, [&](auto *wp) {
        with_type(grad, [&](auto *gp) {
            adamw_fp8_kernel<<<(unsigned)ceil_div(n, 8 * 256), 256, 0, device_stream()>>>(wp, m1, m2, gp, (size_t)n, s, first);
        });
    });
    LAUNCH_CHECK();
}
