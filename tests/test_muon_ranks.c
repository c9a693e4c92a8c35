/* Compares Muon with torch.optim.Muon (tests/golden/muon, scripts/reference_golden.py), on 1, 2 and
 * 4 ranks. Also the same bits on any number of ranks, the error of a momentum in each format, and
 * memory. */
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "kernels/collectives.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/operations.h"
#include "model/checkpoint/safetensors.h"
#include "model/update/muon_step.h"
#include "model/run/quant_stats.h"
#include "tests/ranks_case.h"

enum { STEPS = 8 };

static const char *const names[] = { "q", "k", "v", "o", "gate", "up", "down" };

/* A number in [-1/2, 1/2), a multiple of 2^-24, as in reference_golden.py. */
static float hashed(uint32_t seed, uint32_t i)
{
    uint32_t x = i + seed * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    x ^= x >> 16;
    return (float)(x >> 8) * 0x1p-24f - 0.5f;
}

static DType master_type = F32; /* of the next run */

/* tokens: per sequence; 0: as the architecture has */
static void open_run(Run *r, Format moment, int shard_ranks, int layers, int tokens)
{
    ModelConfig m = with_sizes(architecture(LLAMA), 32, 16, 48, layers);
    m.n_heads = 2;
    m.n_kv_heads = 1;
    m.max_sequence_length = tokens ? tokens : m.max_sequence_length;
    configure(r, &(Case){ "f32", LLAMA, .optimizer = "muon" }, m,
              (Strategy){ .shard_ranks = shard_ranks });
    r->config.recipe.moment1 = moment;
    r->config.recipe.master.dtype = master_type;
    r->config.global_train_batch_size = comm_size();
    place_run(r);
    store_zero_states(&r->store);
}

/* Finds the matrix, and the element in the matrix, of element `at` of a parameter. */
static int matrix_of(const Param *p, size_t at, size_t *element)
{
    static const int first[NUM_LINEARS] = {
        [LINEAR_QKV] = 0, [LINEAR_OUT] = 3, [LINEAR_GATE_UP] = 4, [LINEAR_DOWN] = 6
    };
    int part = p->num_projections - 1;
    while (at < (size_t)p->projection[part].first * (size_t)p->cols)
        part--;
    *element = at - (size_t)p->projection[part].first * (size_t)p->cols;
    return first[p->linear] + part;
}

/* This rank's elements of a block's matrices: the index of the matrix, the element in the matrix,
 * and its position in the region. */
typedef struct {
    int matrix;
    size_t element, at;
} Place;

static size_t places_of(Place **all, const Run *r, int layer)
{
    const int u = unit_of_layer(&r->config.model, layer);
    const UnitLayout *shape = &r->store.shape[u];
    size_t count = 0;
    *all = keep(sizeof **all * shape->numel[TRAINED]);
    for (const Param *p = shape->param; p < shape->param + shape->num_params; p++) {
        size_t first, n = p->is_operand ? shard_part(&r->store.shard[u], p, &first) : 0;
        for (size_t i = 0; i < n; i++, count++) {
            Place *at = &(*all)[count];
            at->matrix = matrix_of(p, first + i, &at->element);
            at->at = p->offset + first + i;
        }
    }
    return count;
}

static float element_of(const Place *p, int layer, int seed)
{
    return hashed((uint32_t)(1000 * p->matrix + 20 * layer + seed), (uint32_t)p->element);
}

/* Sets this rank's elements of a flat F32 tensor (master weights or gradients) to hashed
 * numbers. */
static void fill_matrices(const Run *r, int layer, Tensor flat, int seed)
{
    const int mark = num_kept;
    Place *all;
    const size_t count = places_of(&all, r, layer);
    for (size_t i = 0; i < count; i++) {
        const float x = element_of(&all[i], layer, seed);
        device_put(
            slice_view(&r->store.shard[unit_of_layer(&r->config.model, layer)].slice[TRAINED], flat,
                       all[i].at, 1)
                .data,
            &x, sizeof x);
    }
    release_from(mark);
}

static void train(Run *r)
{
    const ModelConfig *m = &r->config.model;
    for (int l = 0; l < m->n_layers && r->config.recipe.master.dtype == F32; l++)
        fill_matrices(r, l, r->store.shard[unit_of_layer(m, l)].slice[TRAINED].stored, 0);
    for (int v = 0; v < r->store.num_units; v++)
        if (r->store.shard[v].slice[TRAINED].count)
            device_zero(r->store.shard[v].grad.data, tensor_bytes(r->store.shard[v].grad));
    for (int step = 0; step < STEPS; step++) {
        for (int l = 0; l < m->n_layers; l++)
            fill_matrices(r, l, r->store.shard[unit_of_layer(m, l)].grad, 1 + step);
        optimizer_step(&r->store, &r->config, step, 0.02, 1);
    }
    device_sync();
}

/* ---- torch ----------------------------------------------------------------------------------- */

/* Returns the distance of this rank's weights from torch's weights, relative to the distance that
 * torch's weights moved since step 0. */
static double distance(const Run *r, const char *which, int matrix)
{
    char name[64];
    SafeFile *f = safetensors_open("tests/golden/muon/steps.safetensors");
    snprintf(name, sizeof name, "%s.%s", which, names[matrix]);
    const SafeTensor *t = safetensors_find(f, name);
    assert_non_null(t);
    float *torch = keep(t->end - t->begin);
    safetensors_read(f, torch, t, 0, t->end - t->begin);
    safetensors_close(f);
    const Slice *own = &r->store.shard[unit_of_layer(&r->config.model, 0)].slice[TRAINED];
    double sum[2] = { 0 };
    Place *all;
    const size_t count = places_of(&all, r, 0);
    for (size_t i = 0; i < count; i++) {
        float w;
        if (all[i].matrix != matrix)
            continue;
        device_get(&w, slice_view(own, own->stored, all[i].at, 1).data, sizeof w);
        sum[0] += pow((double)w - torch[all[i].element], 2);
        sum[1] += pow((double)torch[all[i].element] - element_of(&all[i], 0, 0), 2);
    }
    comm_sum_over(sum, 2, RANKS_SHARD);
    return sqrt(sum[0] / sum[1]);
}

/* Both round u, X and the products to BF16 at the same places. So results differ if sums in another
 * order round to the other neighbour, by 2^-8 of an element. If every element of the last product
 * did, the distance would be 2^-8. Wrong coefficients, a fused q|k|v or gate|up, another scale, or
 * no Nesterov momentum give 0.05 or more. */
TEST(test_torch)
{
    static const char *const cases[] = { "default", "original", "heads" };
    for (int i = 0; i < 3; i++) {
        Run r;
        open_run(&r, (Format){ F32, 0, false }, comm_size(), 1, 0);
        r.config.optimizer.per_head = i == 2;
        if (i == 1) {
            r.config.optimizer.adjust_lr = ADJUST_ORIGINAL;
            r.config.optimizer.momentum = 0.9;
            r.config.optimizer.nesterov = false;
            r.config.optimizer.weight_decay = 0;
        }
        train(&r);
        for (int m = 0; m < 7; m++) {
            const double d = distance(&r, cases[i], m);
            if (getenv("VERBOSE"))
                printf("%s %s: %.2e\n", cases[i], names[m], d);
            if (!(d < 0x1p-8))
                fail_msg("%s: %s differs from torch's by %g of its way", cases[i], names[m], d);
        }
        close_run(&r);
        release();
    }
}

/* ---- iterations ------------------------------------------------------------------------------ */

/* Returns element i of a vector of powers of two, so that the product of two vectors has rank one
 * in BF16, too. */
static double factor(int i)
{
    return ldexp(i % 2 ? -1 : 1, i % 3);
}

/* A matrix of rank one, x y^T, has one singular value s, first 1: each iteration makes it a s + b
 * s^3 + c s^5, and X is s times x y^T over its norm. Weights of 0 become -lr times the scale times
 * X. An iteration rounds X, A and the factor to BF16, some 2^-8 of s in all, and its derivative is
 * at most 1.4 here: below 2^-4 of s after six. One iteration more or less changes s by a third. */
static void check_iterations(int steps)
{
    Run r;
    open_run(&r, (Format){ F32, 0, false }, comm_size(), 1, 0);
    r.config.optimizer.ns_steps = steps;
    const int u = unit_of_layer(&r.config.model, 0);
    const Shard *s = &r.store.shard[u];
    const Param *p = r.store.shape[u].param;
    while (!p->is_operand || p->linear != LINEAR_OUT)
        p++;
    size_t first, n = shard_part(s, p, &first);
    const double lr = 0.02, scale = 0.2 * sqrt(fmax(p->rows, p->cols));
    double value = 1, squares[2] = { 0 }, sum[2] = { 0 };
    for (int i = 0; i < steps; i++)
        value = 3.4445 * value - 4.775 * pow(value, 3) + 2.0315 * pow(value, 5);
    for (int i = 0; i < p->rows; i++)
        squares[0] += pow(factor(i), 2);
    for (int i = 0; i < p->cols; i++)
        squares[1] += pow(factor(i), 2);
    float *grad = keep((n + 1) * sizeof *grad), *w = keep((n + 1) * sizeof *w);
    for (size_t i = 0; i < n; i++) {
        grad[i] = (float)(factor((int)((first + i) / (size_t)p->cols)) *
                          factor((int)((first + i) % (size_t)p->cols)));
        w[i] = 0;
    }
    if (n > 0) {
        device_put(shard_weights(s, p, first, n).data, w, n * sizeof *w);
        device_put(slice_view(&s->slice[TRAINED], s->grad, p->offset + first, n).data, grad,
                   n * sizeof *grad);
    }
    optimizer_step(&r.store, &r.config, 1, lr, 1);
    if (n > 0)
        device_get(w, shard_weights(s, p, first, n).data, n * sizeof *w);
    for (size_t i = 0; i < n; i++) {
        const double x = value * (double)grad[i] / sqrt(squares[0] * squares[1]);
        sum[0] += pow((double)w[i] / (-lr * scale) - x, 2);
        sum[1] += x * x;
    }
    comm_sum_over(sum, 2, RANKS_SHARD);
    if (!(sqrt(sum[0] / sum[1]) < 0x1p-4))
        fail_msg("%d iterations: X differs by %g", steps, sqrt(sum[0] / sum[1]));
    close_run(&r);
    release();
}

TEST(test_iterations)
{
    for (int steps = 1; steps <= 6; steps++)
        check_iterations(steps);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Compares the weights and the momentum of a block on this rank with those of a rank that is
 * alone. */
static void compare_block(const Run *r, int u, char *const alone[2])
{
    const Shard *s = &r->store.shard[u];
    const UnitLayout *shape = &r->store.shape[u];
    for (const Param *p = shape->param; p < shape->param + shape->num_params; p++) {
        size_t first, n = p->is_operand ? shard_part(s, p, &first) : 0;
        for (int i = 0; i < 2 && n > 0; i++) {
            const Slice own = i ? shard_state(s, 0) : s->slice[TRAINED];
            const size_t size = dtype_size(own.stored.format.dtype);
            char *here = keep(n * size);
            device_get(here, slice_view(&own, own.stored, p->offset + first, n).data, n * size);
            assert_memory_equal(here, alone[i] + (p->offset + first) * size, n * size);
        }
    }
}

/* Whether the updates of three blocks have memory at once. Then ranks exchange the updates of one
 * block while they compute those of another. */
static bool has_three(const Run *r)
{
    const size_t block =
        dtype_size(BF16) * r->store.shape[unit_of_layer(&r->config.model, 0)].numel[TRAINED];
    return r->store.staging_bytes >= muon_bytes(&r->store, &r->config) + 2 * block + 512;
}

/* The FLOPs of this rank's products, and an upper bound of those of one matrix in a step. */
typedef struct {
    double all, matrix, most;
} Work;
static Work work;

static bool count_work(void *watcher, const Operation *o)
{
    Work *w = watcher;
    w->matrix = strcmp(o->name, "muon_normalize") == 0 ? 0 : w->matrix + o->flops;
    w->most = fmax(w->most, w->matrix);
    w->all += o->flops;
    return true;
}

static void ignore_end(void *none, const Operation *o)
{
    (void)none, (void)o;
}

/* If each matrix goes to the rank with the least work, no rank has more than the mean and one
 * matrix more. */
static void check_balance(void)
{
    double most[2] = { work.all / STEPS, work.most }, sum = work.all / STEPS;
    comm_max(most, 2);
    comm_sum(&sum, 1);
    assert_true(most[1] > 0 && most[0] <= sum / comm_size() + most[1]);
}

/* One group of all ranks, and groups of one rank, give the same bits. */
static void compare_ranks(DType master, Format moment, int tokens)
{
    enum { LAYERS = 5 };
    Run alone, sharded;
    char *kept[LAYERS][2];
    master_type = master;
    open_run(&alone, moment, 1, LAYERS, tokens);
    train(&alone);
    for (int l = 0; l < LAYERS; l++) {
        const Shard *s = &alone.store.shard[unit_of_layer(&alone.config.model, l)];
        const Tensor whole[2] = { s->slice[TRAINED].stored, s->state[0] };
        for (int i = 0; i < 2; i++) {
            const size_t bytes = tensor_numel(whole[i]) * dtype_size(whole[i].format.dtype);
            kept[l][i] = keep(bytes);
            device_get(kept[l][i], whole[i].data, bytes);
        }
    }
    open_run(&sharded, moment, comm_size(), LAYERS, tokens);
    assert_int_equal(has_three(&sharded), tokens > 0);
    work = (Work){ 0 };
    const Watch *before = operations_watch(&(Watch){ count_work, ignore_end, &work, NULL });
    train(&sharded);
    operations_watch(before);
    check_balance();
    for (int l = 0; l < LAYERS; l++)
        compare_block(&sharded, unit_of_layer(&sharded.config.model, l), kept[l]);
    close_run(&alone);
    close_run(&sharded);
    master_type = F32;
    release();
}

TEST(test_ranks)
{
    const Format coded = format_of_moment((Format){ E4M3, 128, true });
    compare_ranks(F32, (Format){ F32, 0, false }, 0);
    compare_ranks(F32, coded, 0);
    compare_ranks(F32, coded, 256);
    /* rounded at random, by the position of the element in the whole matrix */
    compare_ranks(BF16, coded, 0);
}

/* ---- momentum -------------------------------------------------------------------------------- */

/* Returns the relative error of the momentum after the steps: sqrt(sum (m - exact)^2 / sum
 * exact^2). */
static double momentum_error(Format format)
{
    Run r;
    double sum[2] = { 0 };
    open_run(&r, format, comm_size(), 1, 0);
    train(&r);
    const Shard *s = &r.store.shard[unit_of_layer(&r.config.model, 0)];
    const Slice own = shard_state(s, 0);
    Elements m = elements_fetch(s->state[0], 0, own.count);
    Place *all;
    const size_t count = places_of(&all, &r, 0);
    for (size_t i = 0; i < count; i++) {
        double exact = 0;
        for (int step = 0; step < STEPS; step++)
            exact += (exact - element_of(&all[i], 0, 1 + step)) * (0.95 - 1);
        sum[0] += pow(m.x[all[i].at - own.first] - exact, 2);
        sum[1] += exact * exact;
    }
    elements_free(&m);
    comm_sum_over(sum, 2, RANKS_SHARD);
    close_run(&r);
    release();
    return sqrt(sum[0] / sum[1]);
}

/* A step rounds with a relative error of up to 2^-8 in BF16 and 2^-4 in E4M3; the root mean square
 * is 1/sqrt(3) of this. A step keeps 0.95 of earlier errors, so at most sqrt(8 steps) of the error
 * remain. Expansion, by a power k >= 1, makes the error of E4M3 smaller. */
TEST(test_momentum)
{
    const double f32 = momentum_error((Format){ F32, 0, false }),
                 bf16 = momentum_error((Format){ BF16, 0, false });
    const double e4m3 = momentum_error(format_of_moment((Format){ E4M3, 128, true }));
    if (getenv("VERBOSE"))
        printf("errors of the momentum: f32 %.2e, bf16 %.2e, e4m3/128+ %.2e\n", f32, bf16, e4m3);
    assert_true(f32 < 8 * 0x1p-23);
    assert_true(bf16 > 0x1p-11 && bf16 < 0x1p-8 / sqrt(3) * sqrt(8));
    assert_true(e4m3 > 0x1p-7 && e4m3 < 0x1p-4 / sqrt(3) * sqrt(8));
}

/* Matrices have a momentum and no other state; all other parameters have m and v and no momentum: 4
 * or 8 bytes per element in F32. */
TEST(test_memory)
{
    Run r;
    size_t bytes = 0;
    open_run(&r, (Format){ F32, 0, false }, comm_size(), 1, 0);
    for (int u = 0; u < r.store.num_units; u++) {
        size_t matrices = 0;
        for (int i = 0; i < r.store.shape[u].num_params; i++)
            matrices += r.store.shape[u].param[i].is_operand
                            ? param_align(param_numel(&r.store.shape[u].param[i]))
                            : 0;
        bytes += 4 * matrices + 8 * (r.store.shape[u].numel[TRAINED] - matrices);
    }
    double all = (double)store_state_bytes(&r.store);
    comm_sum(&all, 1);
    assert_true((size_t)all == bytes);
    close_run(&r);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
