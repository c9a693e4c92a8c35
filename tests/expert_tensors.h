/* Shared by the tests of the operations of experts: routings, shapes and formats; tensors of
 * assignments, and their comparison; grouped GEMMs in double precision.
 *
 * Rows "in use" are those below first[E]. In inputs all other rows are NaN, and in outputs they must
 * not change. u = 2^-24. */
#pragma once
#include "tests/fp8.h"
#include "tests/routing.h"

static inline bool is_operand(Format f)
{
    return format_is_fp8(f) && !f.group;
}

/* ---- cases ------------------------------------------------------------------------------------ */

/* FP8 cases use the shapes of test_fp8_operations. Odd shapes are for the CPU. */
typedef struct {
    const char *name;
    int N, E, k;
    Preference preference;
    int C, F;
    bool odd;
} Case;
static const Case cases[] = {
    { "one-token", 1, 4, 1, EVEN, 64, 48, false },
    { "some-empty", 37, 9, 2, SOME_EMPTY, 176, 64, false },
    { "all", 130, 4, 4, EVEN, 64, 176, false },
    { "all-to-one", 261, 6, 1, ONE_EXPERT, 176, 48, false },
    { "uneven", 301, 5, 3, TIES, 64, 96, false },
    { "odd", 7, 3, 2, EVEN, 7, 5, true },
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* operand: x and act; gradient: dy, dgate_up; stream: y and dx; sum: dw; saved: gate_up. */
typedef struct {
    const char *name;
    Format operand, weight, gradient, stream, sum, saved;
    bool fast;
} Formats;
static const Formats all_formats[] = {
    { "f32", { F32, 0 }, { F32, 0 }, { F32, 0 }, { F32, 0 }, { F32, 0 }, { F32, 0 }, false },
    { "bf16", { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, { BF16, 0 }, false },
    { "bf16-f32-sums",
      { BF16, 0 },
      { BF16, 0 },
      { BF16, 0 },
      { BF16, 0 },
      { F32, 0 },
      { BF16, 0 },
      false },
    { "fp8", { E4M3, 0 }, { E4M3, 0 }, { E5M2, 0 }, { BF16, 0 }, { F32, 0 }, { E4M3, 16 }, false },
    { "fp8-dense",
      { E4M3, 0 },
      { E4M3, 0 },
      { E5M2, 0 },
      { BF16, 0 },
      { BF16, 0 },
      { BF16, 0 },
      true },
};
enum { FORMATS = sizeof all_formats / sizeof all_formats[0] };

static char label[96];
static inline const char *name(const char *op, const Formats *f, const Case *c, const char *variant)
{
    snprintf(label, sizeof label, "%s/%s/%s%s", op, f->name, c->name, variant);
    return label;
}

static inline double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

static inline Routed routed(const Case *c)
{
    return route_on_host(make_logits(c->N, c->E, c->preference), c->k, c->k > 2);
}

/* FP8 cases do not use odd shapes. */
static inline void for_all(void (*test)(const Formats *, const Case *, const Routed *))
{
    for (int i = 0; i < FORMATS; i++)
        for (int j = 0; j < CASES; j++) {
            if (cases[j].odd && (!on_cpu() || is_operand(all_formats[i].operand)))
                continue;
            const Routed g = routed(&cases[j]);
            test(&all_formats[i], &cases[j], &g);
            release();
        }
}

static inline Tensor make_either(Format f, int rows, int cols)
{
    return is_operand(f) ? make_operand(f, rows, cols) : make(f, rows, cols);
}

static inline Tensor only_rows(Tensor t)
{
    t.data_t = NULL;
    return t;
}

static inline Tensor only_columns(Tensor t)
{
    if (is_operand(t.format))
        t.data = NULL;
    return t;
}

static inline float amax_of(Tensor x)
{
    const double *v = values(x);
    double amax = 0;
    for (size_t i = 0; i < tensor_numel(x); i++)
        amax = fmax(amax, fabs(v[i]));
    return (float)amax;
}

/* ---- rows of assignments --------------------------------------------------------------------- */

/* Returns a view of the rows in use, without the transposed copy. */
static inline Tensor in_use(Tensor t, const Routed *g)
{
    t.rows = g->used;
    t.data_t = NULL;
    return t;
}

/* Sets the codes and group scales of all rows after the rows in use to NaN. */
static inline void poison(Tensor t, const Routed *g)
{
    const size_t row = (size_t)t.cols * dtype_size(t.format.dtype), codes = row * (size_t)t.rows,
                 used = row * (size_t)g->used;
    uint8_t *bytes = tensor_snapshot(t);
    memset(bytes + used, 0xff, codes - used);
    for (int c = 0; t.data_t && c < t.cols; c++)
        memset(bytes + codes + c * t.rows + g->used, 0xff, (size_t)(t.rows - g->used));
    if (t.format.group)
        memset(bytes + codes + used / (size_t)t.format.group, 0xff,
               (codes - used) / (size_t)t.format.group);
    tensor_restore(t, bytes);
}

/* Makes the rows of assignments from x: rows of tokens, 0 in padding, NaN after the rows in use.
 * FP8 tensors are encoded from BF16. */
static inline Tensor put_assigned(Format f, const Routed *g, int cols, float *x)
{
    Tensor t = make_either(f, g->rows, cols),
           source = format_has_scales(f) ? make((Format){ BF16, 0 }, g->rows, cols) : t;
    for (size_t i = 0; i < tensor_numel(t); i++)
        if (g->host.assignment[i / (size_t)cols] < 0)
            x[i] = 0;
    put(source, x);
    quantize(t, source);
    poison(t, g);
    return t;
}

static inline Tensor make_assigned(Format f, const Routed *g, int cols, uint64_t seed, float low,
                                   float high)
{
    const size_t n = (size_t)g->rows * (size_t)cols;
    float *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = uniform(seed, i, low, high);
    return put_assigned(f, g, cols, x);
}

/* Makes values with few mantissa bits, as make_round in fp8.h does, for the same reason. */
static inline Tensor make_round_assigned(Format f, const Routed *g, int cols, uint64_t seed)
{
    const size_t n = (size_t)g->rows * (size_t)cols;
    float *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = ((float)(random_bits(seed, i) % 15) - 7) / 4;
    return put_assigned(f, g, cols, x);
}

/* Copies the bytes of the rows in use: codes, transposed codes, scale. */
static inline uint8_t *used_bytes(Tensor t, const Routed *g, size_t *size)
{
    const size_t row = (size_t)t.cols * dtype_size(t.format.dtype), codes = row * (size_t)t.rows,
                 used = row * (size_t)g->used, transposed = t.data_t ? used : 0;
    const uint8_t *all = tensor_snapshot(t);
    const size_t scales = tensor_bytes(t) - codes * (t.data_t ? 2 : 1);
    uint8_t *bytes = keep(used + transposed + scales);
    memcpy(bytes, all, used);
    for (int c = 0; t.data_t && c < t.cols; c++)
        memcpy(bytes + used + c * g->used, all + codes + c * t.rows, (size_t)g->used);
    *size = used + transposed;
    if (scales) {
        const size_t n = t.format.group ? used / (size_t)t.format.group : sizeof(float);
        memcpy(bytes + *size, all + codes * (t.data_t ? 2 : 1), n);
        *size += n;
    }
    return bytes;
}

static inline void check_same_rows(const char *name, Tensor t, Tensor expected, const Routed *g)
{
    size_t n, m;
    const uint8_t *a = used_bytes(t, g, &n), *b = used_bytes(expected, g, &m);
    assert_true(n == m);
    check_same_bytes(name, a, b, n);
}

/* Checks that all rows after the rows in use still have the bytes with which guarded() filled
 * memory. */
static inline void check_not_written(const char *name, Tensor t, const Routed *g)
{
    const size_t row = (size_t)t.cols * dtype_size(t.format.dtype), codes = row * (size_t)t.rows;
    const uint8_t *bytes = tensor_snapshot(t);
    for (size_t i = row * (size_t)g->used; i < codes; i++)
        if (bytes[i] != 0xcd)
            fail_msg("%s: row %zu was written; %d rows are in use", name, i / row, g->used);
    for (size_t i = 0; t.data_t && i < codes; i++)
        if (i % (size_t)t.rows >= (size_t)g->used && bytes[codes + i] != 0xcd)
            fail_msg("%s: transposed row %zu was written; %d rows are in use", name,
                     i % (size_t)t.rows, g->used);
}

static inline void check_used_transposed(const char *name, Tensor t, const Routed *g)
{
    const uint8_t *codes = tensor_snapshot(t), *transposed = codes + tensor_numel(t);
    for (int r = 0; t.data_t && r < g->used; r++)
        for (int c = 0; c < t.cols; c++)
            if (codes[r * t.cols + c] != transposed[c * t.rows + r])
                fail_msg("%s[%d,%d]: code %02x, transposed %02x", name, r, c, codes[r * t.cols + c],
                         transposed[c * t.rows + r]);
}

/* Makes an output with the rows in use, in a format that a GEMM can write. */
static inline void check_output(const char *name, Tensor t, const Routed *g, const double *ref,
                                const double *bound)
{
    const Tensor used = in_use(t, g);
    check_not_written(name, t, g);
    check_used_transposed(name, t, g);
    if (is_operand(t.format)) {
        check_operand(name, used, ref, bound);
        golden_operand(name, used, ref, bound);
    } else {
        check_close(name, used, ref, bound);
        golden_check(name, used, bound);
    }
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* Returns a view of expert e's matrix in w (E*O,C). */
static inline Tensor expert_matrix(Tensor w, int e, int E)
{
    const size_t first = (size_t)e * (tensor_numel(w) / (size_t)E);
    w.rows /= E;
    w.data = (char *)w.data + first * dtype_size(w.format.dtype);
    if (is_operand(w.format)) {
        w.data_t = (char *)w.data_t + first;
        w.scale = (float *)w.scale + SCALE_FLOATS * e;
    }
    return w;
}

static inline Tensor make_matrices_memory(Format f, int E, int O, int C)
{
    Tensor w = make_either(f, E * O, C);
    if (is_operand(f))
        w.scale = guarded(sizeof(float) * SCALE_FLOATS * (size_t)E);
    return w;
}

/* Makes the matrices of E experts. Each is larger than the one before, so that the FP8 scales
 * differ. *x gets the values. */
static inline Tensor make_matrices(Format f, int E, int O, int C, uint64_t seed, double **x)
{
    const size_t each = (size_t)O * (size_t)C;
    Tensor w = make_matrices_memory(f, E, O, C);
    *x = keep(tensor_numel(w) * sizeof **x);
    for (int e = 0; e < E; e++) {
        const float size = 1 + 0.3f * (float)e;
        Tensor own = expert_matrix(w, e, E),
               source = make_filled((Format){ f.dtype == F32 ? F32 : BF16, 0 }, O, C,
                                    seed + (uint64_t)e, -size, size);
        if (is_operand(f))
            quantize(own, source);
        else
            device_copy(own.data, source.data, tensor_bytes(source));
        memcpy(*x + (size_t)e * each, values(own), each * sizeof **x);
    }
    return w;
}

/* Makes FP8 matrices whose values have few mantissa bits. */
static inline Tensor make_round_matrices(Format f, int E, int O, int C, uint64_t seed)
{
    Tensor w = make_matrices_memory(f, E, O, C);
    for (int e = 0; e < E; e++) {
        const Tensor own = expert_matrix(w, e, E),
                     codes = make_round(f, O, C, seed + (uint64_t)e, e % 2 ? 0.125f : 0.25f);
        device_copy(own.data, codes.data, tensor_numel(own));
        device_copy(own.data_t, codes.data_t, tensor_numel(own));
        device_copy(own.scale, codes.scale, sizeof(float));
    }
    return w;
}

/* ---- grouped GEMMs --------------------------------------------------------------------------- */

/* Bounds for F32 and BF16, as in test_kernels: a factor of 2 covers tensor cores, which truncate,
 * and cuBLASLt, which may round a product before it adds a BF16 value. fp8.h has the bound for
 * FP8. */
static inline void gemm(double *ref, double *bound, const double *old, const Formats *f, int rows,
                        int cols, int K, Strided a, Strided b)
{
    const double rounding = old && f->sum.dtype == BF16 && !on_cpu() ? 0x1p-8 : 0;
    if (is_operand(f->operand)) {
        product(ref, bound, old, rows, cols, K, a, b);
        for (int i = 0; i < rows * cols; i++)
            bound[i] += rounding * fabs(ref[i] - (old ? old[i] : 0));
        return;
    }
    for (int i = 0; i < rows * cols; i++) {
        double sum = 0, terms = old ? fabs(old[i]) : 0;
        for (int k = 0; k < K; k++) {
            const double p = a.x[i / cols * a.row + k * a.col] * b.x[i % cols * b.row + k * b.col];
            sum += p, terms += fabs(p);
        }
        ref[i] = (old ? old[i] : 0) + sum;
        bound[i] = 2 * (K + 2) * U24 * terms + rounding * fabs(sum);
    }
}

/* y = x wT: each expert's rows of x (R,C) times its matrix in w (E*O,C) */
static inline void grouped(double *ref, double *bound, const double *x, const double *w, int C,
                           int O, const Formats *f, const Routed *g)
{
    for (int e = 0; e < g->host.experts; e++) {
        const int first = g->host.first[e];
        gemm(ref + first * O, bound + first * O, NULL, f, g->count[e], O, C,
             (Strided){ x + first * C, C, 1 }, (Strided){ w + e * O * C, C, 1 });
    }
}

/* dx = dy w, with dy (R,O). */
static inline void grouped_dx(double *ref, double *bound, const double *dy, const double *w, int C,
                              int O, const Formats *f, const Routed *g)
{
    for (int e = 0; e < g->host.experts; e++) {
        const int first = g->host.first[e];
        gemm(ref + first * C, bound + first * C, NULL, f, g->count[e], C, O,
             (Strided){ dy + first * O, O, 1 }, (Strided){ w + e * O * C, 1, C });
    }
}

static inline void grouped_dw(double *ref, double *bound, const double *old, const double *dy,
                              const double *x, int C, int O, const Formats *f, const Routed *g)
{
    for (int e = 0; e < g->host.experts; e++) {
        const int first = g->host.first[e], at = e * O * C;
        gemm(ref + at, bound + at, old + at, f, O, C, g->count[e],
             (Strided){ dy + first * O, 1, O }, (Strided){ x + first * C, 1, C });
    }
}
