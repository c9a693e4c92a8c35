#include "model/update/muon_step.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/collectives.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"
#include "kernels/runtime/transfer.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

/* The quintic iteration of torch.optim.Muon: X = a X + (b A + c A A) X with A = X X^T. */
static const float quintic[3] = { 3.4445f, -4.775f, 2.0315f };

static const Format bf16 = { BF16, 0, false };

bool muon_steps(const ParamStore *store, const Param *p)
{
    return store->optimizer->orthogonalizes && p->is_operand && p->region == TRAINED;
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* The rows of a parameter that form a matrix, and the rank of the shard group that orthogonalizes
 * the matrix. */
typedef struct {
    const Param *param;
    int first, rows, owner;
} Matrix;
typedef struct {
    Matrix *matrix;
    int count;
} Matrices;

static double cost(const Matrix *x)
{
    const double m = fmin(x->rows, x->param->cols), n = fmax(x->rows, x->param->cols);
    return m * m * (2 * n + m);
}

/* Assigns matrices to ranks, the most expensive matrix first. Each goes to the rank with the least
 * work since the step began; of several such ranks, to the first. */
static void choose_owners(Matrices *all, int ranks, double *work)
{
    for (int i = 0; i < all->count; i++) {
        int next = -1, least = 0;
        for (int k = 0; k < all->count; k++)
            if (all->matrix[k].owner < 0 &&
                (next < 0 || cost(&all->matrix[k]) > cost(&all->matrix[next])))
                next = k;
        for (int r = 1; r < ranks; r++)
            if (work[r] < work[least])
                least = r;
        all->matrix[next].owner = least;
        work[least] += cost(&all->matrix[next]);
    }
}

/* Lists the matrices of a unit: the parts of its parameters. With optimizer.per_head, each head of
 * q, k and v is a matrix. */
static Matrices list_matrices(const ParamStore *store, const Config *c, int u)
{
    Matrices all = { 0 };
    for (const Param *p = store->shape[u].param;
         p < store->shape[u].param + store->shape[u].num_params; p++)
        for (int i = 0; muon_steps(store, p) && i < p->num_projections; i++) {
            const bool heads = c->optimizer.per_head && p->linear == LINEAR_QKV;
            const int rows = heads ? c->model.head_dim : p->projection[i].rows;
            for (int first = 0; first < p->projection[i].rows; first += rows) {
                all.matrix = xrealloc(all.matrix, ((size_t)all.count + 1) * sizeof *all.matrix);
                all.matrix[all.count++] = (Matrix){ p, p->projection[i].first + first, rows, -1 };
            }
        }
    return all;
}

/* return the first element of a matrix in the region, and the first element after the matrix */
static size_t first_of(const Matrix *x)
{
    return x->param->offset + (size_t)x->first * (size_t)x->param->cols;
}

static size_t end_of(const Matrix *x)
{
    return first_of(x) + (size_t)x->rows * (size_t)x->param->cols;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Numbers of units in memory. ALONE: only the unit that is computed. AHEAD: also the previous unit,
 * whose result is being scattered, and the next unit, which is being gathered. */
enum { ALONE = 1, AHEAD = 3 };

typedef struct {
    int units;           /* units in memory at once: ALONE or AHEAD */
    Tensor whole[AHEAD]; /* (1, n): u of a unit, later X */
    void *next;          /* X of a matrix after one iteration */
    void *gram, *factor; /* A, and b A + c A A */
    float *squares;      /* ||u||^2 */
    Transfer gather[AHEAD], scatter[AHEAD];
    double *work; /* work of each rank since the step began */
} Memory;

static Memory place(const ParamStore *store, const Config *c, Arena *a, int units)
{
    Memory m = { .units = units };
    size_t unit = 0, matrix = 0, side = 0;
    for (int u = 0; u < store->num_units; u++) {
        if (!store_holds(store, u) || store->shape[u].matrices == 0)
            continue;
        Matrices all = list_matrices(store, c, u);
        unit = store->shape[u].numel[TRAINED] > unit ? store->shape[u].numel[TRAINED] : unit;
        for (const Matrix *x = all.matrix; x < all.matrix + all.count; x++) {
            const size_t n = end_of(x) - first_of(x),
                         least = (size_t)(x->rows < x->param->cols ? x->rows : x->param->cols);
            matrix = n > matrix ? n : matrix;
            side = least > side ? least : side;
        }
        free(all.matrix);
    }
    if (unit > INT32_MAX)
        die("optimizer.name is muon: a block has %zu trained parameters, and Muon updates at most "
            "%d at once; use adamw",
            unit, INT32_MAX);
    const size_t size = dtype_size(BF16);
    for (int i = 0; i < units; i++)
        m.whole[i] = tensor_alloc(a, bf16, 1, (int)unit);
    m.next = arena_alloc(a, matrix * size);
    m.gram = arena_alloc(a, side * side * size);
    m.factor = arena_alloc(a, side * side * size);
    m.squares = arena_alloc(a, sizeof(float));
    return m;
}

static size_t bytes_of(const ParamStore *store, const Config *c, int units)
{
    Arena measured = { 0 };
    place(store, c, &measured, units);
    return measured.used;
}

size_t muon_bytes(const ParamStore *store, const Config *c)
{
    return store->optimizer->orthogonalizes && !store->forward_only ? bytes_of(store, c, ALONE) : 0;
}

/* Returns elements `first` to `end` - 1 of t, (1, n) in BF16. */
static Tensor elements(Tensor t, size_t first, size_t end)
{
    return tensor_at((char *)t.data + first * dtype_size(BF16), bf16, 1, (int)(end - first));
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Replaces x (rows, columns) by X, its orthogonal factor. If there are more rows than columns, A is
 * X^T X and is multiplied from the right, so that no matrix is transposed. Iterations alternate
 * between two buffers, and the last one ends in x. */
static void orthogonalize(const Memory *m, const Config *c, Tensor x)
{
    const bool tall = x.rows > x.cols;
    const int side = tall ? x.cols : x.rows;
    const Tensor next = tensor_at(m->next, bf16, x.rows, x.cols),
                 gram = tensor_at(m->gram, bf16, side, side);
    const Tensor factor = tensor_at(m->factor, bf16, side, side);
    const bool odd = c->optimizer.ns_steps % 2;
    Tensor from = odd ? next : x, to = odd ? x : next;
    device_zero(m->squares, sizeof *m->squares);
    sum_squares(m->squares, x);
    muon_normalize(from, x, m->squares, (float)c->optimizer.ns_eps);
    for (int i = 0; i < c->optimizer.ns_steps; i++) {
        matmul_symmetric(gram, from, tall, 1, (Tensor){ 0 }, 0);
        matmul_symmetric(factor, gram, false, quintic[2], gram, quintic[1]);
        matmul_scaled(to, tall ? from : factor, tall ? factor : from, 1, from, quintic[0]);
        const Tensor made = to;
        to = from;
        from = made;
    }
}

static double scale_of(const Config *c, const Matrix *x)
{
    const double rows = x->rows, cols = x->param->cols;
    return c->optimizer.adjust_lr == ADJUST_ORIGINAL ? sqrt(fmax(1, rows / cols))
                                                     : 0.2 * sqrt(fmax(rows, cols));
}

static void update_momentum(const ParamStore *store, const Config *c, const StepParams *step, int u,
                            Tensor whole)
{
    const Shard *s = &store->shard[u];
    const Slice own = shard_state(s, 0);
    if (own.count == 0)
        return;
    muon_momentum(elements(whole, own.first, own.first + own.count),
                  slice_view(&own, own.stored, own.first, own.count),
                  slice_view(&s->slice[TRAINED], s->grad, own.first, own.count),
                  (float)c->optimizer.momentum, c->optimizer.nesterov, (float)step->grad_scale);
}

/* own: this rank's slice of X. */
static void apply(const ParamStore *store, const Config *c, const StepParams *step, int u,
                  const Matrix *x, Tensor own)
{
    const Slice *s = &store->shard[u].slice[TRAINED];
    const Param *p = x->param;
    const size_t from = first_of(x) > s->first ? first_of(x) : s->first;
    const size_t end = end_of(x) < s->first + s->count ? end_of(x) : s->first + s->count;
    if (from >= end)
        return;
    muon_apply(
        slice_view(s, s->stored, from, end - from), elements(own, from - s->first, end - s->first),
        (float)(1 - step->lr * c->optimizer.weight_decay), (float)(step->lr * scale_of(c, x)),
        step->seed, store->shape[u].first + p->number + (from - p->offset));
}

/* The update of one unit. `slot` is the unit's memory in `Memory`: consecutive units with matrices
 * use different slots. */
typedef struct {
    int unit, slot;
    Tensor whole, own;
} Update;

static Update update_of(const ParamStore *store, const Memory *m, int u, int i)
{
    const Slice *s = &store->shard[u].slice[TRAINED];
    const Tensor whole = elements(m->whole[i % m->units], 0, store->shape[u].numel[TRAINED]);
    return (Update){ u, i % m->units, whole, elements(whole, s->first, s->first + s->count) };
}

/* Gathers the u of all ranks in `whole`. */
static void gather(const ParamStore *store, const Config *c, const StepParams *step, Memory *m,
                   Update t)
{
    trace_begin("momentum", t.unit);
    update_momentum(store, c, step, t.unit, t.whole);
    trace_end();
    if (store->shards == 1)
        return;
    transfer_begin(&m->gather[t.slot], QUEUE_GATHER);
    trace_begin("gather updates", t.unit);
    watchdog_mark_together("gathering updates", t.unit);
    comm_all_gather(t.whole.data, t.own.data, tensor_bytes(t.own), RANKS_SHARD);
    trace_end();
    transfer_end(&m->gather[t.slot]);
}

/* Replaces u of the unit by X; this rank's slice is `own`. */
static void compute(const ParamStore *store, const Config *c, Memory *m, Update t)
{
    Matrices all = list_matrices(store, c, t.unit);
    choose_owners(&all, store->shards, m->work);
    transfer_wait(&m->gather[t.slot], "updates", t.unit);
    trace_begin("muon", t.unit);
    for (const Matrix *x = all.matrix; x < all.matrix + all.count; x++) {
        Tensor matrix = elements(t.whole, first_of(x), end_of(x));
        if (x->owner != store->rank) {
            device_zero(matrix.data, tensor_bytes(matrix));
            continue;
        }
        matrix.rows = x->rows;
        matrix.cols = x->param->cols;
        orthogonalize(m, c, matrix);
    }
    trace_end();
    free(all.matrix);
    if (store->shards == 1)
        return;
    transfer_begin(&m->scatter[t.slot], QUEUE_REDUCE);
    trace_begin("scatter updates", t.unit);
    watchdog_mark_together("scattering updates", t.unit);
    comm_reduce_scatter(t.own, t.whole, RANKS_SHARD);
    trace_end();
    transfer_end(&m->scatter[t.slot]);
}

static void finish(const ParamStore *store, const Config *c, const StepParams *step, Memory *m,
                   Update t)
{
    Matrices all = list_matrices(store, c, t.unit);
    transfer_wait(&m->scatter[t.slot], "updates", t.unit);
    trace_begin("apply", t.unit);
    for (const Matrix *x = all.matrix; x < all.matrix + all.count; x++)
        apply(store, c, step, t.unit, x, t.own);
    trace_end();
    free(all.matrix);
}

/* Lists the units with matrices on this stage. */
static int list_units(const ParamStore *store, int *unit)
{
    int count = 0;
    for (int u = 0; u < store->num_units; u++)
        if (store_holds(store, u) && store->shape[u].matrices)
            unit[count++] = u;
    return count;
}

void muon_step(ParamStore *store, const Config *c, const StepParams *step)
{
    const bool ahead = store->shards > 1 && bytes_of(store, c, AHEAD) <= store->staging_bytes;
    Arena arena = { .memory = store->staging };
    Memory m = place(store, c, &arena, ahead ? AHEAD : ALONE);
    m.work = xcalloc((size_t)store->shards, sizeof *m.work);
    int *unit = xcalloc((size_t)store->num_units, sizeof *unit);
    const int count = list_units(store, unit);
    for (int i = -ahead; i < count + ahead; i++) {
        const int next = i + ahead, last = i - ahead;
        if (next < count)
            gather(store, c, step, &m, update_of(store, &m, unit[next], next));
        if (i >= 0 && i < count)
            compute(store, c, &m, update_of(store, &m, unit[i], i));
        if (last >= 0)
            finish(store, c, step, &m, update_of(store, &m, unit[last], last));
    }
    for (int i = 0; i < AHEAD; i++) {
        transfer_free(&m.gather[i]);
        transfer_free(&m.scatter[i]);
    }
    free(m.work);
    free(unit);
}
