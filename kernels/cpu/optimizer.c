/* AdamW with decoupled weight decay [Loshchilov & Hutter 2019, alg. 2]. kernels/fp8.c has the
 * format of FP8 moments, kernels/dynamic8.c the format of the 8-bit moments of bitsandbytes. */
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/dynamic8.h"
#include "kernels/random.h"

enum { BLOCK = 4096 };

/* One step for n elements, all given as floats. */
typedef void Step(float *w, float *m, float *v, const float *grad, size_t n, AdamW a);

void store_weights(Tensor w, size_t at, const float *x, size_t n, uint64_t seed, uint64_t first)
{
    if (w.format.dtype == BF16)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)w.data)[at + i] =
                bf16_round_stochastic(x[i], random_16(seed, first + at + i));
    else
        tensor_store(w, at, x, n);
}

/* As store_weights, for elements that are some columns of each row. */
static void store_numbered(Tensor w, size_t at, const float *x, size_t n, const AdamW *a,
                           uint64_t first)
{
    const Numbering *p = &a->numbering;
    for (size_t done = 0, run; done < n; done += run) {
        const size_t i = p->start + at + done, left = p->width - i % p->width;
        run = left < n - done ? left : n - done;
        store_weights(w, at + done, x + done, run, a->seed, first + i / p->width * p->skip);
    }
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

static void update(const char *op, Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a,
                   uint64_t first, Step *step)
{
    check_tensor(op, "w", w, 1, w.cols);
    check_tensor(op, "grad", grad, 1, w.cols);
    check_plain(op, "w", w);
    check_plain(op, "grad", grad);
    float *wi = cpu_scratch(0, BLOCK), *mi = cpu_scratch(1, BLOCK), *vi = cpu_scratch(2, BLOCK),
          *gi = cpu_scratch(3, BLOCK);
    for (size_t at = 0, numel = tensor_numel(w); at < numel; at += BLOCK) {
        size_t n = numel - at < BLOCK ? numel - at : BLOCK;
        tensor_load(wi, w, at, n);
        tensor_load(gi, grad, at, n);
        tensor_load(mi, m, at, n);
        tensor_load(vi, v, at, n);
        step(wi, mi, vi, gi, n, a);
        if (a.numbering.width)
            store_numbered(w, at, wi, n, &a, first);
        else
            store_weights(w, at, wi, n, a.seed, first);
        tensor_store(m, at, mi, n);
        tensor_store(v, at, vi, n);
    }
}

static void check_moment(const char *name, Tensor t, int n)
{
    check_tensor("adamw", name, t, 1, n);
    CHECK(!format_is_dynamic8(t.format),
          "adamw: %s is %s; only adamw8bit has moments in this format", name,
          format_name(t.format));
    CHECK(!format_is_fp8(t.format) || (t.format.group && BLOCK % t.format.group == 0),
          "adamw: %s is %s; FP8 moments have groups whose size divides %d", name,
          format_name(t.format), BLOCK);
    CHECK(!format_has_byte_scales(t.format),
          "adamw: %s is %s with one byte of scale per group; moments need larger scales "
          "(format_of_moment)",
          name, format_name(t.format));
}

void backend_adamw(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    check_moment("m", m, w.cols);
    check_moment("v", v, w.cols);
    update(OPERATION, w, m, v, grad, a, first, step);
}

/* ---- 8-bit moments --------------------------------------------------------------------------- */

static void step_8bit(float *w, float *m, float *v, const float *grad, size_t n, AdamW a)
{
    const Dynamic8Step s = dynamic8_step(a);
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(grad[i])) {
            m[i] = v[i] = 0;
            continue;
        }
        const float g = s.grad_scale * grad[i];
        v[i] = s.beta2 * v[i] + s.rest2 * g * g;
        m[i] = s.beta1 * m[i] + s.rest1 * g;
        w[i] = (w[i] + s.rate * (m[i] / (sqrtf(v[i]) + s.eps))) * s.keep;
    }
}

static void check_8bit(const char *name, Tensor t, DType d, int n)
{
    check_tensor("adamw8bit", name, t, 1, n);
    CHECK(t.format.dtype == d, "adamw8bit: %s is %s; expected %s", name, format_name(t.format),
          format_name((Format){ d, DYNAMIC8_GROUP, false }));
}

void backend_adamw8bit(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    check_8bit("m", m, DYNAMIC8, w.cols);
    check_8bit("v", v, UDYNAMIC8, w.cols);
    update(OPERATION, w, m, v, grad, a, first, step_8bit);
}
