/* AdamW with FP8 moments in groups of 128 [COAT sec. 4]: decode, update and encode in registers, in
 * one pass. One or both moments are in FP8. If only one moment is in FP8, the other is in F32 or
 * BF16: FP8-LM has m in FP8 and v in 16 bits [Peng et al. 2023, arXiv 2310.18313].
 *
 * Eight threads share a group, with sixteen elements each. Shuffles compute the maximum and minimum
 * of the new moments. Bytes per element with BF16 weights and gradients: 2 + 2 + 2, four for codes,
 * and 1/16 for scales (1/8 with dynamic range expansion), 10.06 or 10.13 in all. With v in BF16 an
 * element takes 12.03 or 12.06 bytes. With v in F32 it takes 16.03 or 16.06 bytes, and each access
 * to v uses half of every sector.
 *
 * Rounding: powers are 2^(k log2 x) with the hardware's approximations, whose exponent has an error
 * of a few 2^-22. The root and the quotient are approximations too. If a value lies within this
 * error of the midpoint between two codes, its code may differ by one from the specification's.
 * NOTE: the rate of special functions limits the speed; the memory bandwidth does not. An SM
 * computes 16 special functions per clock. With both moments expanded an element takes 10 1/4 of
 * them (4 per moment, 1 1/2 in the update, the rest per group), and some 45 other instructions. So
 * the kernel uses approximations that flush to zero (other approximations scale their arguments),
 * constants from the host, formats as template parameters, and one reciprocal for two elements. */
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/moments.cuh"

/* The update rearranged, with the corrections c1 and c2:
 *     m / c1 / (sqrt(v / c2) + eps) = sqrt(c2) / c1 * m / (sqrt(v) + sqrt(c2) eps)
 *     w - lr (... + weight_decay w) = (1 - lr weight_decay) w - lr (...)
 * With u = 2^-24, the root and the reciprocal add an error of 2 u each to the quotient, and two
 * constants, a sum and three products add u each, 10 u in all. w has a further error of 3 u of its
 * own size. */
struct QuickStep {
    float rest1, rest2; /* (1 - beta1) grad_scale, (1 - beta2) grad_scale^2 */
    float keep;         /* 1 - lr weight_decay */
    float rate;         /* lr sqrt(c2) / c1 */
    float eps;          /* eps sqrt(c2) */
    uint64_t sequence;  /* random_sequence(seed) */
};

/* Updates two elements, which share one reciprocal: 1/a = b (1/ab). A root is 0 or at least 2^-63,
 * so 1/ab is finite if sqrt(c2) eps > 2^-63. If a gradient or its square is infinite or NaN, both
 * elements are spoiled. On entry m and v are the old moments times beta. */
__device__ static inline void update_two(float *w, float *m, float *v, float g0, float g1,
                                         const QuickStep &s)
{
    m[0] = __fmaf_rn(s.rest1, g0, m[0]);
    m[1] = __fmaf_rn(s.rest1, g1, m[1]);
    v[0] = __fmaf_rn(s.rest2 * g0, g0, v[0]);
    v[1] = __fmaf_rn(s.rest2 * g1, g1, v[1]);
    const float a = sqrt_quick(v[0]) + s.eps, b = sqrt_quick(v[1]) + s.eps,
                r = inverse_quick(a * b);
    w[0] = __fmaf_rn(-s.rate, m[0] * (b * r), s.keep * w[0]);
    w[1] = __fmaf_rn(-s.rate, m[1] * (a * r), s.keep * w[1]);
}

/* n: number of elements, a multiple of GROUP. Threads after the end store nothing. They recompute
 * the last group, because all threads must call the shuffles. */
template <class FM, class FV, typename TW, typename TG>
__global__ __launch_bounds__(THREADS, 3) void adamw_fp8_kernel(TW *w, Moment m, Moment v,
                                                               const TG *grad, unsigned n,
                                                               QuickStep s, uint64_t first,
                                                               Numbering numbering)
{
    const unsigned group = (blockIdx.x * THREADS + threadIdx.x) / LANES, last = n / GROUP - 1;
    const unsigned at = min(group, last) * GROUP + threadIdx.x % LANES * 8;
    const bool inside = group <= last;
    Pack<TW> wp[2];
    Pack<TG> gp[2];
    float wx[2][8], mx[2][8], vx[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        wp[h] = load_pack<true>((const TW *)w + at + h * HALF, 8);
        gp[h] = load_pack<true>(grad + at + h * HALF, 8);
    }
    const auto mc = load_moment<FM>(m, at);
    const auto vc = load_moment<FV>(v, at);
    decode_moment<FM, true>(mx, mc, m.beta);
    decode_moment<FV, false>(vx, vc, v.beta);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            wx[h][i] = wp[h][i], wx[h][i + 1] = wp[h][i + 1];
            update_two(wx[h] + i, mx[h] + i, vx[h] + i, gp[h][i], gp[h][i + 1], s);
        }
        if (inside)
            store_weights(w + at + h * HALF, wx[h], s.sequence,
                          number_of(first, at + h * HALF, numbering));
    }
    store_moment<FM, true>(m, at, mx, inside);
    store_moment<FV, false>(v, at, vx, inside);
}

static Moment moment(const char *name, Tensor t, int n, float beta)
{
    check_tensor("adamw", name, t, 1, n);
    if (format_is_dynamic8(t.format) || (format_is_fp8(t.format) && t.format.group != GROUP) ||
        n % GROUP)
        die("adamw: %s is %s of %d elements; the CUDA back end needs FP8 moments in whole groups "
            "of %d elements; the other moment may be FP8, F32 or BF16",
            name, format_name(t.format), n, (int)GROUP);
    CHECK(!format_has_byte_scales(t.format),
          "adamw: %s is %s with one byte of scale per group; moments need larger scales "
          "(format_of_moment)",
          name, format_name(t.format));
    return { (uint8_t *)t.data, t.scale, t.format.expand ? log2f(beta) : beta };
}

/* NOTE: these functions leave out combinations without a kernel. `if constexpr` around a launch in
 * a lambda would be shorter. nvcc 13.0 compiles it, but does not register the kernels at run
 * time. */
/* Calls f(forms of m and v). At least one of them is FP8; optimizer.cu has the other cases. */
template <typename F>
static void with_forms(Tensor m, Tensor v, F f)
{
    if (!format_is_fp8(m.format))
        with_dense_form(m, [&](auto fm) { with_fp8_form(v, [&](auto fv) { f(fm, fv); }); });
    else if (!format_is_fp8(v.format))
        with_fp8_form(m, [&](auto fm) { with_dense_form(v, [&](auto fv) { f(fm, fv); }); });
    else
        with_fp8_form(m, [&](auto fm) { with_fp8_form(v, [&](auto fv) { f(fm, fv); }); });
}

static QuickStep make_quick_step(const AdamW &a)
{
    const double root = sqrt((double)a.correction2), scale = a.grad_scale;
    return { (float)((1 - (double)a.beta1) * scale),
             (float)((1 - (double)a.beta2) * scale * scale),
             (float)(1 - (double)a.lr * a.weight_decay),
             (float)(a.lr * root / a.correction1),
             (float)(a.eps * root),
             random_sequence(a.seed) };
}

void adamw_fp8(Tensor w, Tensor m, Tensor v, Tensor grad, const AdamW &a, uint64_t first)
{
    const int n = w.cols;
    const Moment m1 = moment("m", m, n, a.beta1), m2 = moment("v", v, n, a.beta2);
    const QuickStep s = make_quick_step(a);
    const unsigned blocks = (unsigned)ceil_div(n, GROUP / LANES * THREADS);
    check_numbers("adamw", first, a.numbering);
    if (n == 0)
        return;
    with_type(w, [&](auto *wp) {
        with_type(grad, [&](auto *gp) {
            with_forms(m, v, [&](auto fm, auto fv) {
                adamw_fp8_kernel<decltype(fm), decltype(fv)>
                    <<<blocks, THREADS, 0, device_stream()>>>(wp, m1, m2, gp, (unsigned)n, s, first,
                                                              a.numbering);
            });
        });
    });
    LAUNCH_CHECK();
}
