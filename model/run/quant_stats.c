/* kernels/fp8.c decodes and rounds everything, whatever back end stored it. */
#include "model/run/quant_stats.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/fp8.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/values.h"

static size_t scale_bytes(Format f, size_t n)
{
    if (!format_has_scales(f))
        return 0;
    return f.group ? format_scale_bytes(f, n) : sizeof(float);
}

static Elements elements_new(Format f, size_t n)
{
    return (Elements){ .t = { .data = xmalloc(n * dtype_size(f.dtype)),
                              .scale = xmalloc(scale_bytes(f, n) + 1),
                              .format = f,
                              .rows = 1,
                              .cols = (int)n },
                       .x = xmalloc(n * sizeof(float)),
                       .n = n };
}

void elements_free(Elements *s)
{
    free(s->t.data), free(s->t.scale), free(s->x);
}

Elements elements_fetch(Tensor t, size_t first, size_t n)
{
    Elements s = elements_new(t.format, n);
    device_get(s.t.data, (const char *)t.data + first * dtype_size(t.format.dtype),
               n * dtype_size(t.format.dtype));
    if (format_has_scales(t.format))
        device_get(s.t.scale,
                   (const char *)t.scale + (t.format.group ? scale_bytes(t.format, first) : 0),
                   scale_bytes(t.format, n));
    tensor_load(s.x, s.t, 0, n);
    return s;
}

void elements_replace(Elements *s, const double *x)
{
    for (size_t i = 0; i < s->n; i++)
        s->x[i] = (float)x[i];
    tensor_store(s->t, 0, s->x, s->n);
    tensor_load(s->x, s->t, 0, s->n);
}

Elements elements_round(const double *x, size_t n, Format f)
{
    Elements s = elements_new(f, n);
    elements_replace(&s, x);
    return s;
}

double *fetch_values(Tensor t, size_t first, size_t n)
{
    Elements s = elements_fetch(t, first, n);
    double *x = xmalloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = s.x[i];
    elements_free(&s);
    return x;
}

void sample_without_factors(Elements *s, Tensor stored)
{
    const size_t cols = (size_t)stored.cols, bytes = sizeof(float) * cols;
    if (!stored.channel)
        return;
    float *factor = xmalloc(bytes);
    device_get(factor, stored.channel, bytes);
    for (size_t i = 0; i < s->n; i++)
        s->x[i] /= factor[i % cols];
    free(factor);
}

/* log2(max |x| / min |x|) over values other than 0; -1 if there is none. */
static double range_log2(const double *x, size_t n)
{
    double most = 0, least = INFINITY;
    for (size_t i = 0; i < n; i++)
        if (x[i] != 0) {
            most = fmax(most, fabs(x[i]));
            least = fmin(least, fabs(x[i]));
        }
    return most > 0 ? log2(most / least) : -1;
}

double elements_k(Elements s, size_t group)
{
    return fp8_pair_power(((const uint32_t *)s.t.scale)[group]);
}

static void add_ranges(Stats *st, Elements s, const double *x, size_t group)
{
    for (size_t i = 0; i < s.n; i += group) {
        double range = range_log2(x + i, group),
               k = s.t.format.expand ? elements_k(s, i / group) : 1;
        if (range < 0)
            continue;
        st->groups++;
        st->log_range += range;
        st->k += k;
        st->log_range_expanded += k * range;
    }
}

/* Adds the relative error of a tensor q. Tensors that are 0 do not count. */
void stats_add_error(Stats *st, const float *q, const double *x, size_t n)
{
    double error2 = 0, norm2 = 0;
    for (size_t i = 0; i < n; i++) {
        error2 += (q[i] - x[i]) * (q[i] - x[i]);
        norm2 += x[i] * x[i];
    }
    if (norm2 > 0) {
        st->tensors++;
        st->error2 += error2 / norm2;
    }
}

void stats_add(Stats *st, Elements s, const double *exact)
{
    Format f = s.t.format;
    const uint8_t *codes = s.t.data, largest = f.dtype == E4M3 ? 0x7e : 0x7b;
    double *x = xmalloc(s.n * sizeof *x);
    for (size_t i = 0; i < s.n; i++) {
        x[i] = exact ? exact[i] : s.x[i];
        if (exact && exact[i] == 0)
            continue;
        st->values++;
        st->zeros += s.x[i] == 0;
        st->largest += format_is_fp8(f) && (codes[i] & 0x7f) == largest;
    }
    add_ranges(st, s, x, f.group ? (size_t)f.group : format_is_fp8(f) ? s.n : MOMENT_GROUP);
    if (exact)
        stats_add_error(st, s.x, exact, s.n);
    free(x);
}

void stats_sum(Stats *st, Ranks g)
{
    comm_sum_over((double *)st, sizeof *st / sizeof(double), g);
}

double stats_error(const Stats *st)
{
    return sqrt(st->error2 / st->tensors);
}
