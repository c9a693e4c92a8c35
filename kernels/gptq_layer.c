/* GPTQ of one layer, built from its operations and from GEMMs. The GEMMs take whole matrices, so
 * that there are few shapes. Therefore they also multiply the half of C that is zero. */
#include "kernels/gptq_layer.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/check.h"
#include "kernels/kernels.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"

static const Tensor NONE = { 0 };
enum { MORE_DAMPING = 10, TRIES = 4 };

/* Device memory for the work on one layer. */
typedef struct {
    void *memory;
    Tensor m, c;             /* m (I,I): see gptq_factor; c (I,I): CT */
    Tensor e, y;             /* e (O,I): W - scale * code; y (O,I): e C */
    Tensor sums;             /* (O,GPTQ_COLUMNS) */
    float *diagonal, *total; /* (I); one element */
    int *order, *failed;     /* (I); one element */
} Work;

static void place(Work *k, Arena *a, int O, int I)
{
    const Format f32 = { F32, 0 };
    k->m = tensor_alloc(a, f32, I, I);
    k->c = tensor_alloc(a, f32, I, I);
    k->e = tensor_alloc(a, f32, O, I);
    k->y = tensor_alloc(a, f32, O, I);
    k->sums = tensor_alloc(a, f32, O, GPTQ_COLUMNS);
    k->diagonal = arena_alloc(a, sizeof(float) * (size_t)I);
    k->order = arena_alloc(a, sizeof(int) * (size_t)I);
    k->total = arena_alloc(a, sizeof(float));
    k->failed = arena_alloc(a, sizeof(int));
}

static Work open_work(int O, int I)
{
    Work k;
    Arena arena = { 0 };
    place(&k, &arena, O, I);
    arena = (Arena){ .memory = device_alloc(arena.used) };
    place(&k, &arena, O, I);
    k.memory = arena.memory;
    return k;
}

/* ---- the order ------------------------------------------------------------------------------- */

typedef struct {
    float value;
    int column;
} Weighed;

static int by_falling_value(const void *a, const void *b)
{
    const Weighed *x = a, *y = b;
    return x->value != y->value ? (x->value < y->value ? 1 : -1) : x->column - y->column;
}

/* Sets k->order. Returns the mean of the diagonal. */
static double choose_order(const Work *k, Tensor h, bool ordered)
{
    const size_t I = (size_t)h.rows;
    float *diagonal = xmalloc(I * sizeof *diagonal);
    Weighed *column = xmalloc(I * sizeof *column);
    int *order = xmalloc(I * sizeof *order);
    double sum = 0;
    gptq_diagonal(k->diagonal, h);
    device_get(diagonal, k->diagonal, I * sizeof *diagonal);
    for (size_t i = 0; i < I; i++) {
        column[i] = (Weighed){ isnan(diagonal[i]) ? 0 : diagonal[i], (int)i };
        sum += (double)diagonal[i];
    }
    if (ordered)
        qsort(column, I, sizeof *column, by_falling_value);
    for (size_t i = 0; i < I; i++)
        order[i] = column[i].column;
    device_put(k->order, order, I * sizeof *order);
    free(diagonal);
    free(column);
    free(order);
    return sum / (double)I;
}

/* ---- the factor ------------------------------------------------------------------------------ */

static int rows_from(int first, int all)
{
    return all - first < GPTQ_COLUMNS ? all - first : GPTQ_COLUMNS;
}

/* Computes the factor from the last columns to the first. Returns false if H is not positive
 * definite. */
static bool factorize(const Work *k, Tensor h, double damping)
{
    const int I = h.rows;
    int failed;
    gptq_damp(k->m, h, k->order, (float)damping);
    device_zero(k->failed, sizeof *k->failed);
    for (int first = (I - 1) / GPTQ_COLUMNS * GPTQ_COLUMNS; first >= 0; first -= GPTQ_COLUMNS) {
        const int count = rows_from(first, I);
        const Tensor c = tensor_rows(k->c, first, count);
        gptq_factor(c, k->failed, tensor_rows(k->m, first, count), first);
        matmul_dw(k->m, c, c);
    }
    device_get(&failed, k->failed, sizeof failed);
    return !failed;
}

/* Returns the first damping that gives a factor, or 0 if no damping does. */
static double find_factor(const Work *k, Tensor h, double mean, double damping)
{
    for (int i = 0; i < TRIES && isfinite(mean); i++, damping *= MORE_DAMPING)
        if (factorize(k, h, damping * mean))
            return damping;
    return 0;
}

/* ---- codes ----------------------------------------------------------------------------------- */

static void choose_codes(const Work *k, int8_t *codes, Tensor values, GptqWeights w,
                         bool to_nearest)
{
    const int O = w.w.rows, I = w.w.cols;
    device_zero(k->e.data, tensor_bytes(k->e));
    for (int first = 0; first < I; first += GPTQ_COLUMNS) {
        const int count = rows_from(first, I);
        const Tensor sums = tensor_at(k->sums.data, k->sums.format, O, count),
                     c = tensor_rows(k->c, first, count);
        if (!to_nearest)
            matmul(sums, k->e, c, NONE);
        gptq_columns(codes, values, k->e, w, to_nearest ? NONE : sums, to_nearest ? NONE : c, first,
                     count);
    }
}

/* Returns |e C|^2. */
static double measure(const Work *k)
{
    float total;
    matmul(k->y, k->e, k->c, NONE);
    device_zero(k->total, sizeof *k->total);
    sum_squares(k->total, k->y);
    device_get(&total, k->total, sizeof total);
    return (double)total;
}

GptqResult gptq(int8_t *codes, Tensor values, Tensor w, const float *scale, int group, Tensor h,
                double damping, bool ordered)
{
    Work k = open_work(w.rows, w.cols);
    const double mean = choose_order(&k, h, ordered);
    const GptqWeights weights = { w, scale, group, k.order };
    GptqResult r = { .damping = find_factor(&k, h, mean, damping), .error = NAN, .rounded = NAN };
    choose_codes(&k, codes, values, weights, true);
    if (r.damping > 0) {
        r.rounded = measure(&k);
        choose_codes(&k, codes, values, weights, false);
        r.error = measure(&k);
    }
    device_sync();
    device_free(k.memory);
    return r;
}

/* ---- checks ---------------------------------------------------------------------------------- */

void gptq_check_f32(const char *op, Tensor t, int rows, int cols)
{
    check_tensor(op, "a matrix", t, rows, cols);
    CHECK(t.format.dtype == F32, "%s: a matrix in %s; expected f32", op, format_name(t.format));
}

void gptq_check_rows(const char *op, Tensor m, int first)
{
    gptq_check_f32(op, m, m.rows, m.cols);
    CHECK(m.rows <= GPTQ_COLUMNS && first >= 0 && first + m.rows <= m.cols,
          "%s: %d rows from %d on, of %d", op, m.rows, first, m.cols);
}

void gptq_check_columns(const char *op, Tensor values, Tensor e, GptqWeights w, Tensor sums,
                        Tensor c, int first, int count)
{
    const int O = w.w.rows, I = w.w.cols;
    gptq_check_f32(op, w.w, O, I);
    gptq_check_f32(op, e, O, I);
    check_tensor(op, "values", values, O, I);
    check_plain(op, "values", values);
    CHECK(w.group > 0 && I % w.group == 0, "%s: groups of %d in rows of %d", op, w.group, I);
    CHECK(count > 0 && count <= GPTQ_COLUMNS && first >= 0 && first + count <= I,
          "%s: %d columns from %d on, of %d", op, count, first, I);
    CHECK(!c.data == !sums.data, "%s: c without sums, or sums without c; expected both or neither",
          op);
    if (c.data) {
        gptq_check_f32(op, c, count, I);
        gptq_check_f32(op, sums, O, count);
    }
}
