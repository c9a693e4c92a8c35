/* Shared by tests of adapters' products: adapter matrices, and sums of products in double with
 * error bounds of F32. */
#pragma once
#include "tests/fp8.h"

/* Formats of x, of xa with y and add, of the matrix, and of the gradient of the matrix. */
typedef struct {
    const char *name;
    Format x, dense, w, dw;
} Formats;

typedef struct {
    int N, C, rank;
    bool is_b;
    int parts;
    struct {
        int first, width;
    } part[LORA_PROJECTIONS];
} Shape;

static char label[96];
static inline const char *name(const char *op, const Formats *f, const Shape *s)
{
    snprintf(label, sizeof label, "%s/%s/%dx%d-%d%s%d", op, f->name, s->N, s->C, s->rank,
             s->is_b ? "b" : "a", s->parts);
    return label;
}

static inline void check(const char *op, const Formats *f, const Shape *s, Tensor t,
                         const double *ref, const double *bound)
{
    check_close(name(op, f, s), t, ref, bound);
    golden_check(label, t, bound);
}

static inline LoraMatrix make_matrix(const Shape *s, Format f, uint64_t seed)
{
    LoraMatrix m = { .is_b = s->is_b, .num_projections = s->parts };
    int rows = 0;
    for (int i = 0; i < s->parts; i++) {
        m.projection[i].first = s->part[i].first, m.projection[i].width = s->part[i].width;
        rows += s->part[i].width;
    }
    m.w = s->is_b ? make_filled(f, rows, s->rank, seed, -1, 1)
                  : make_filled(f, s->rank, s->C, seed, -1, 1);
    return m;
}

/* Returns the index of the matrix element for column c of the wide tensor and column j of xa; -1:
 * there is none. */
static inline int place(const Shape *s, int c, int j)
{
    if (!s->is_b)
        return j * s->C + c;
    for (int i = 0, row = 0; i < s->parts; row += s->part[i++].width)
        if (c >= s->part[i].first && c < s->part[i].first + s->part[i].width && j / s->rank == i)
            return (row + c - s->part[i].first) * s->rank + j % s->rank;
    return -1;
}

/* Element i of a result is a sum of `terms` products in F32, in any order. Decoding gives each
 * product an error of up to 1 u. A factor of 2 covers tensor cores, which truncate instead of
 * rounding. */
typedef struct {
    double *ref, *bound;
    int terms;
} Sums;

static inline Sums start_sums(size_t n, const double *start, int terms)
{
    Sums s = { keep(n * sizeof *s.ref), keep(n * sizeof *s.bound), terms };
    for (size_t i = 0; start && i < n; i++)
        s.ref[i] = start[i], s.bound[i] = 2 * (terms + 4) * U24 * fabs(start[i]);
    return s;
}

static inline void add_product(Sums *s, int i, double a, double b)
{
    s->ref[i] += a * b;
    s->bound[i] += 2 * (s->terms + 4) * U24 * fabs(a * b);
}

/* which: the product to add: 0: xa = scale x w; 1: y += xa wT; 2: dm += xaT x */
static inline void add_products(Sums *sums, int which, const Shape *s, const double *x,
                                const double *xa, const double *w, double scale)
{
    const int P = s->parts * s->rank;
    for (int c = 0; c < s->C; c++)
        for (int j = 0; j < P; j++) {
            const int at = place(s, c, j);
            for (int n = 0; n < s->N && at >= 0; n++)
                if (which == 0)
                    add_product(sums, n * P + j, scale * x[n * s->C + c], w[at]);
                else if (which == 1)
                    add_product(sums, n * s->C + c, xa[n * P + j], w[at]);
                else
                    add_product(sums, at, xa[n * P + j], x[n * s->C + c]);
        }
}
