/* Measures the error of Muon's momentum in each format, during a run whose momentum is F32. Runs by
 * hand, on one rank, with the options of ./train:
 *
 *     make BACKEND=cpu build/cpu/tests/bench_momentum
 *     build/cpu/tests/bench_momentum configs/tiny.yaml --optimizer.name=muon --format.moment1=f32 --global_train_batch_size=4 \
 *         --max_duration=80
 *
 * The linker replaces two operations. Each format has its own momentum, which is updated with the
 * gradients of the run. Every 20 steps, a line per format has the relative error of its momentum,
 * the cosine between its X and the X of the run over all matrices together, and the smallest cosine
 * of a single matrix. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"

enum { FORMATS = 3, MOST_UNITS = 256, EVERY = 20 };

static const char *const names[FORMATS] = { "bf16", "e4m3/128", "e4m3/128+" };
static const Format bf16 = { BF16, 0, false };

/* A unit's momentum and u in each format; key: the address of its momentum in the run. */
typedef struct {
    const void *key;
    Tensor m[FORMATS], u[FORMATS];
    int steps;
} Copies;
static Copies unit[MOST_UNITS];

/* The unit whose matrices are normalized next, the start of its updates u, and the sums of a
 * step. */
static const Copies *now;
static const char *updates;
typedef struct {
    double off, all, product, square[2], least;
} Sums;
static Sums sums[FORMATS];

void __real_muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                          float grad_scale);
void __wrap_muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                          float grad_scale);
void __real_muon_normalize(Tensor y, Tensor x, const float *squares, float eps);
void __wrap_muon_normalize(Tensor y, Tensor x, const float *squares, float eps);

static Tensor make(Format f, int rows, int cols)
{
    Tensor t = { .format = f, .rows = rows, .cols = cols };
    t.data = device_alloc(tensor_numel(t) * dtype_size(f.dtype));
    if (format_has_scales(f))
        t.scale = device_alloc(format_scale_bytes(f, tensor_numel(t)));
    return t;
}

/* Returns all values in F32; the caller frees them. */
static float *values(Tensor t)
{
    Tensor wide = make((Format){ F32, 0, false }, t.rows, t.cols);
    const size_t bytes = tensor_bytes(wide);
    float *x = xmalloc(bytes);
    quantize(wide, t);
    device_get(x, wide.data, bytes);
    device_free(wide.data);
    return x;
}

static Copies *find(Tensor m)
{
    const Format format[FORMATS] = { bf16, format_of_moment((Format){ E4M3, 128, false }),
                                     format_of_moment((Format){ E4M3, 128, true }) };
    int i = 0;
    for (; i < MOST_UNITS && unit[i].key && unit[i].key != m.data; i++)
        ;
    if (i == MOST_UNITS)
        die("more than %d units", MOST_UNITS);
    for (int k = 0; k < FORMATS && !unit[i].key; k++) {
        unit[i].m[k] = make(format[k], 1, m.cols);
        unit[i].u[k] = make(bf16, 1, m.cols);
    }
    unit[i].key = m.data;
    return &unit[i];
}

static int printed; /* the step of the lines that were printed last */

static void print_sums(void)
{
    const int step = unit[0].steps / EVERY * EVERY;
    if (step == printed)
        return;
    printed = step;
    for (int k = 0; k < FORMATS; k++)
        printf("momentum after %d steps: %-10s off by %.3f %%; X: cosine %.5f, least of a matrix "
               "%.5f\n",
               step, names[k], 100 * sqrt(sums[k].off / sums[k].all),
               sums[k].product / sqrt(sums[k].square[0] * sums[k].square[1]), sums[k].least);
}

/* Called for the first unit of a step. Prints the sums of the previous step. */
static void begin_step(void)
{
    if (unit[0].steps == 0)
        atexit(print_sums);
    print_sums();
    for (int k = 0; k < FORMATS; k++)
        sums[k] = (Sums){ .least = 1 };
}

void __wrap_muon_momentum(Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov,
                          float grad_scale)
{
    Copies *c = find(m);
    now = NULL;
    updates = u.data;
    if (c == unit)
        begin_step();
    __real_muon_momentum(u, m, grad, momentum, nesterov, grad_scale);
    for (int k = 0; k < FORMATS; k++)
        __real_muon_momentum(c->u[k], c->m[k], grad, momentum, nesterov, grad_scale);
    if (++c->steps % EVERY)
        return;
    now = c;
    float *exact = values(m);
    for (int k = 0; k < FORMATS; k++) {
        float *x = values(c->m[k]);
        for (int i = 0; i < m.cols; i++) {
            sums[k].off += ((double)x[i] - exact[i]) * ((double)x[i] - exact[i]);
            sums[k].all += (double)exact[i] * exact[i];
        }
        free(x);
    }
    free(exact);
}

/* Returns X of u, computed as in model/update/muon_step.c; the caller frees it. */
static float *orthogonalized(Tensor u, float eps)
{
    const bool tall = u.rows > u.cols;
    const int side = tall ? u.cols : u.rows;
    Tensor from = make(bf16, u.rows, u.cols), to = make(bf16, u.rows, u.cols),
           gram = make(bf16, side, side);
    Tensor factor = make(bf16, side, side), squares = make((Format){ F32, 0, false }, 1, 1);
    sum_squares(squares.data, u);
    __real_muon_normalize(from, u, squares.data, eps);
    for (int i = 0; i < 5; i++) {
        matmul_symmetric(gram, from, tall, 1, (Tensor){ 0 }, 0);
        matmul_symmetric(factor, gram, false, 2.0315f, gram, -4.775f);
        matmul_scaled(to, tall ? from : factor, tall ? factor : from, 1, from, 3.4445f);
        const Tensor made = to;
        to = from;
        from = made;
    }
    float *x = values(from);
    const Tensor all[] = { from, to, gram, factor, squares };
    for (int i = 0; i < 5; i++)
        device_free(all[i].data);
    return x;
}

void __wrap_muon_normalize(Tensor y, Tensor x, const float *squares, float eps)
{
    float *exact = now ? orthogonalized(x, eps) : NULL;
    for (int k = 0; k < FORMATS && now; k++) {
        Tensor u = now->u[k];
        double product = 0, square[2] = { 0 };
        u.data = (char *)u.data + ((const char *)x.data - updates);
        u.rows = x.rows, u.cols = x.cols;
        float *found = orthogonalized(u, eps);
        for (size_t i = 0; i < tensor_numel(x); i++) {
            product += (double)found[i] * exact[i];
            square[0] += (double)found[i] * found[i];
            square[1] += (double)exact[i] * exact[i];
        }
        free(found);
        sums[k].product += product, sums[k].square[0] += square[0], sums[k].square[1] += square[1];
        sums[k].least = fmin(sums[k].least, product / sqrt(square[0] * square[1]));
    }
    free(exact);
    __real_muon_normalize(y, x, squares, eps);
}
