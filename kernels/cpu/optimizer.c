/* AdamW with decoupled weight decay [Loshchilov & Hutter 2019, alg. 2], and FP8 moments [COAT, sec. 4].
 *
 * FP8 moments, per group of G: without expansion x = S code, scale (n/G) as of any grouped tensor. With expansion the
 * group is stretched to the range of the format by a power: with a = max|x|, b = min|x| over the group,
 *     k = floor(16 log2(R) / log2(a/b)) / 16, R = max^2/2: the dynamic range that the format's codes cover,
 *     code = Q(sign(x) (|x|/a)^k max),    x = sign(code) (|code|/max)^(1/k) a.
 * DIFFERS from the paper, which stores S, k and c = sqrt(a b) with f(x) = (|x|/c)^k and S = (a/c)^k / max: c cancels
 * in f(x)/S = (|x|/a)^k max, so two numbers say it all. The scales of a group are the BF16 pair (S, k), S = a/max
 * rounded up as without expansion, and a is read back as S max; k is a multiple of 1/16 up to 16, exact in BF16. */
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/random.h"

enum { BLOCK = 4096, MAX_K = 16, K_STEPS = 16 };

/* NOTE: in double, so that the floor does not depend on which log2 a back end has. */
static float expansion_power(float a, float b, DType d)
{
    const float tiny = 1e-20f;
    const double range = (double)fp8_max(d) * fp8_max(d) / 2;
    double ratio = log2((double)(a + tiny) / (double)(b + tiny));
    double steps = ratio > 0 ? floor(log2(range) / ratio * K_STEPS) : MAX_K * K_STEPS;
    return (float)fmin(fmax(steps, 1), MAX_K * K_STEPS) / K_STEPS;
}

static void load_expanded(float *x, Tensor t, size_t first, size_t n)
{
    const float max = fp8_max(t.format.dtype);
    const uint8_t *codes = (const uint8_t *)t.data + first;
    for (size_t i = 0; i < n; i++) {
        const uint16_t *scale = (const uint16_t *)t.scale + (first + i) / (size_t)t.format.group * 2;
        const float a = bf16_decode(scale[0]) * max, k = bf16_decode(scale[1]);
        const float f = fp8_decode(codes[i], t.format.dtype);
        x[i] = f == 0 ? f : copysignf(powf(fabsf(f) / max, 1 / k) * a, f);
    }
}

static void store_expanded(Tensor t, size_t first, const float *x, size_t n)
{
    const DType d = t.format.dtype;
    const size_t group = (size_t)t.format.group;
    const float max = fp8_max(d);
    uint8_t *codes = (uint8_t *)t.data + first;
    for (size_t g = 0; g < n; g += group) {
        uint16_t *scale = (uint16_t *)t.scale + (first + g) / group * 2;
        float b = INFINITY, top = abs_max(x + g, group);
        for (size_t i = g; i < g + group; i++)
            b = fminf(b, fabsf(x[i]));
        const float k = expansion_power(top, b, d);
        scale[0] = fp8_group_scale(top, d);
        scale[1] = bf16_encode(k);
        const float a = bf16_decode(scale[0]) * max;
        for (size_t i = g; i < g + group; i++)
            codes[i] = fp8_encode(copysignf(powf(fabsf(x[i]) / a, k) * max, x[i]), d);
    }
}

static void load_moment(float *x, Tensor t, size_t first, size_t n)
{
    if (t.format.expand)
        load_expanded(x, t, first, n);
    else
        load(x, t, first, n);
}

static void store_moment(Tensor t, size_t first, const float *x, size_t n)
{
    if (t.format.expand)
        store_expanded(t, first, x, n);
    else
        store(t, first, x, n);
}

static void store_weights(Tensor w, size_t at, const float *x, size_t n, uint64_t seed, uint64_t first)
{
    if (w.format.dtype == BF16)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)w.data)[at + i] = bf16_round_stochastic(x[i], random_16(seed, first + at + i));
    else
        store(w, at, x, n);
}

static void step(float *w, float *m, float *v, const float *grad, size_t n, AdamW a)
{
    for (size_t i = 0; i < n; i++) {
        const float g = a.grad_scale * grad[i];
        m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
        v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
        const float update = m[i] / a.correction1 / (sqrtf(v[i] / a.correction2) + a.eps);
        w[i] -= a.lr * (update + a.weight_decay * w[i]);
    }
}

static void check_moment(const char *name, Tensor t, int n)
{
    check_tensor("adamw", name, t, 1, n);
    CHECK(!format_is_fp8(t.format) || (t.format.group && BLOCK % t.format.group == 0),
          "adamw: %s is %s; FP8 moments have groups whose size divides %d", name, format_name(t.format), BLOCK);
}

void adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_TENSOR(w, 1, w.cols);
    CHECK_TENSOR(grad, 1, w.cols);
    CHECK_PLAIN(w);
    CHECK_PLAIN(grad);
    check_moment("m", m, w.cols);
    check_moment("v", v, w.cols);
    float *wi = scratch(0, BLOCK), *mi = scratch(1, BLOCK), *vi = scratch(2, BLOCK), *gi = scratch(3, BLOCK);
    for (size_t at = 0, numel = tensor_numel(w); at < numel; at += BLOCK) {
        size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        load(wi, w, at, n);
        load(gi, grad, at, n);
        load_moment(mi, m, at, n);
        load_moment(vi, v, at, n);
        step(wi, mi, vi, gi, n, a);
        store_weights(w, at, wi, n, a.seed, first);
        store_moment(m, at, mi, n);
        store_moment(v, at, vi, n);
    }
}
