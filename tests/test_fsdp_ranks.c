/* Sharding on any number of ranks: gathered weights are those scattered, bit for bit, and follow
 * the trained master weights; sums over ranks are correct; every strategy trains like no sharding;
 * two runs, and queues that overlap or not, give the same bits. On 1, 2 and 4 ranks. */
#include <math.h>

#include "model/store/param_store_sizes.h"
#include "tests/kit.h"

#include "tests/ranks_run.h"
#include "model/update/update.h"
#include "tests/mapping_unit.h"

/* LAYERS: both shared buffers are used twice */
enum { BATCH = 8, MICRO = 1, STEPS = 3, LAYERS = 3, MAX_UNITS = LAYERS + 3 };

static const struct {
    const char *name;
    int groups;
    Gathering gathering;
    GradSum sum;
} strategies[] = {
    { "no_shard", 0, GATHER_OFTEN, SUM_OFTEN },
    { "full_shard", 1, GATHER_OFTEN, SUM_OFTEN },
    { "full_shard, one sum", 1, GATHER_OFTEN, SUM_ONCE },
    { "shard_grad_op", 1, GATHER_ONCE, SUM_OFTEN },
    { "hybrid_shard", 2, GATHER_OFTEN, SUM_OFTEN },
    { "hybrid_shard_zero2", 2, GATHER_ONCE, SUM_ONCE_IF_FITS },
};
enum { NUM_STRATEGIES = sizeof strategies / sizeof strategies[0] };

/* drift: see check_curve; modules: with adapters on these, on a base in this format; bf16_head:
 * instead of the recipe's; mapped: with a unit of an added kind */
enum { SOME_MODULES = 1 << LORA_Q | 1 << LORA_V | 1 << LORA_UP | 1 << LORA_DOWN };
static const struct {
    const char *name;
    SmallModel model;
    double drift;
    unsigned modules;
    BaseFormat base;
    bool bf16_head, mapped;
} recipe_cases[] = {
    { "f32", LLAMA, 64 * U24, .mapped = true },
    { "bf16", OLMO2, 0x1p-9 },
    { "fp8", LLAMA_GQA, 0x1p-6 },
    { "coat", OLMO, 0x1p-6 },
    { "coat-lean", LLAMA_GQA, 0x1p-6, .bf16_head = true },
    { "bf16", QWEN3, 0x1p-9 },
    { "coat", OLMO3, 0x1p-6, .bf16_head = true },
    { "bf16", OLMO, 0x1p-9, SOME_MODULES, BASE_AS_FROZEN },
    { "fp8", OLMO2, 0x1p-6, ALL_MODULES, BASE_AS_FROZEN },
    { "bf16", QWEN3, 0x1p-9, SOME_MODULES, BASE_E4M3 },
    { "coat-lean", LLAMA, 0x1p-6, ALL_MODULES, BASE_E4M3, .mapped = true },
    { "coat", QWEN2, 0x1p-6, .bf16_head = true },
    { "bf16", QWEN2, 0x1p-9, SOME_MODULES, BASE_NF4 },
    { "f32", LLAMA_GQA, 64 * U24, ALL_MODULES, BASE_NF4 },
    { "coat", OLMO3, 0x1p-6, SOME_MODULES, BASE_NF4 },
};
enum { NUM_RECIPES = sizeof recipe_cases / sizeof recipe_cases[0] };

typedef struct {
    double loss[STEPS], norm[STEPS];
} Curve;

/* Results without sharding, per recipe: all weights in their compute format, the first step's
 * gradients, losses. */
static struct {
    void *codes[MAX_UNITS][NUM_PARAMS], *codes_t[MAX_UNITS][NUM_PARAMS];
    double *grad[MAX_UNITS];
    size_t numel[MAX_UNITS]; /* of these */
    Curve curve;
} reference[NUM_RECIPES];

static ModelConfig small(int recipe)
{
    ModelConfig m = with_sizes(architecture(recipe_cases[recipe].model), 64, 16, 80, LAYERS);
    m.architecture = recipe_cases[recipe].mapped ? &mapped : NULL;
    return recipe_cases[recipe].modules
               ? with_adapters(m, 6, recipe_cases[recipe].modules, recipe_cases[recipe].base)
               : m;
}

static void open_run(Run *r, int recipe, Strategy strategy)
{
    const ModelConfig m = small(recipe);
    *r = (Run){ 0 };
    model_config(&r->config, &m, recipe_cases[recipe].name, MICRO);
    if (recipe_cases[recipe].bf16_head)
        r->config.recipe.head = (Format){ BF16, 0 };
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = strategy;
    divide(strategy.shard_ranks);
    place_run(r);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Returns the loss of the batch per token. */
static double step_loss(Run *r, int step)
{
    forward_backward(&r->model, &r->store, &r->config, step, BATCH / comm_size());
    double loss = take_losses(&r->model).loss / (BATCH * r->config.model.max_sequence_length);
    comm_sum(&loss, 1);
    return loss;
}

static Curve train(Run *r)
{
    Curve c;
    for (int s = 0; s < STEPS; s++) {
        c.loss[s] = step_loss(r, s);
        c.norm[s] = optimizer_grad_norm(&r->store);
        optimizer_step(&r->store, &r->config, s + 1, 1e-2, fmin(1, 1 / c.norm[s]));
    }
    return c;
}

/* ---- what is gathered ------------------------------------------------------------------------ */

/* Codes or transposed codes, and the scale, in memory that the caller frees. */
static void *fetch(Tensor t, bool transposed, size_t *bytes)
{
    const size_t n = tensor_numel(t) * dtype_size(t.format.dtype);
    *bytes = n + (t.scale ? sizeof(float) : 0);
    char *copy = malloc(*bytes);
    assert_non_null(copy);
    device_get(copy, transposed ? t.data_t : t.data, n);
    if (t.scale)
        device_get(copy + n, t.scale, sizeof(float));
    return copy;
}

/* A parameter's master weights from all shards. */
static Tensor whole_master(const ParamStore *store, int u, const Param *p)
{
    const Shard *s = &store->shard[u];
    const Tensor t = make(store->recipe.master, p->rows, p->cols);
    const size_t size = dtype_size(t.format.dtype), bytes = tensor_bytes(t);
    size_t first, n = shard_part(s, p, &first);
    unsigned char *whole = keep(bytes);
    double *sum = keep(bytes * sizeof *sum);
    if (n)
        device_get(whole + first * size, shard_weights(s, p, first, n).data, n * size);
    for (size_t i = 0; i < bytes; i++)
        sum[i] = whole[i];
    /* of bytes, 0 on all ranks except one: exact, also for -0 */
    comm_sum_over(sum, (int)bytes, RANKS_SHARD);
    for (size_t i = 0; i < bytes; i++)
        whole[i] = (unsigned char)sum[i];
    device_put(t.data, whole, bytes);
    return t;
}

/* The expected result of fetch for `like`: its master weights, quantized as a whole in other
 * memory. */
static void *fetch_quantized(Tensor like, Tensor master, bool transposed, size_t *bytes)
{
    Tensor t = make(like.format, like.rows, like.cols);
    t.data_t = like.data_t ? guarded(tensor_numel(t)) : NULL;
    quantize(t, master);
    return fetch(t, transposed, bytes);
}

/* Checks one unit's tensors: if `updated`, trained ones against the master weights; others against
 * the reference of the first run. So training does not change frozen tensors. */
static void check_unit(const ParamStore *store, int u, const UnitTensors *w, bool backward,
                       bool updated, int recipe, const char *name)
{
    for (int k = 0; k < store->shape[u].num_params; k++) {
        const Param *p = &store->shape[u].param[k];
        const Tensor t = w->tensor[p->id];
        const bool transposed = backward && t.data_t, trained = updated && p->region == TRAINED;
        void **first =
            transposed ? &reference[recipe].codes_t[u][k] : &reference[recipe].codes[u][k];
        size_t bytes;
        void *found = fetch(t, transposed, &bytes);
        void *expected =
            trained ? fetch_quantized(t, whole_master(store, u, p), transposed, &bytes) : *first;
        char text[128];
        snprintf(text, sizeof text, "%s, %s: %s%s of unit %d%s", recipe_cases[recipe].name, name,
                 p->name, transposed ? ", transposed," : "", u, trained ? ", trained" : "");
        if (!expected) {
            *first = found;
            continue;
        }
        check_same_bytes(text, found, expected, bytes);
        free(found);
        if (trained)
            free(expected);
        release();
    }
}

/* Gathers every unit twice, as in forward and backward. */
static void gather_all(Run *r, bool updated, int recipe, const char *name)
{
    ParamStore *store = &r->store;
    for (int i = 0; i < 2 * store->num_units; i++) {
        const bool backward = i >= store->num_units;
        const int u = backward ? 2 * store->num_units - 1 - i : i;
        fsdp_gather(store, u, backward ? FOR_BACKWARD : FOR_FORWARD);
        check_unit(store, u, fsdp_acquire(store, u), backward, updated, recipe, name);
        fsdp_release(store, u);
    }
}

/* ---- the reference --------------------------------------------------------------------------- */

static void keep_gradients(const Run *r, int recipe)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Shard *s = &r->store.shard[u];
        double *copy = calloc(s->slice[TRAINED].count + 1, sizeof *copy);
        assert_non_null(copy);
        if (s->slice[TRAINED].count)
            memcpy(copy, values(s->grad), s->slice[TRAINED].count * sizeof *copy);
        reference[recipe].grad[u] = copy;
        reference[recipe].numel[u] = s->slice[TRAINED].count;
        release();
    }
}

static void test_unsharded(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_RECIPES; i++) {
        Run r;
        open_run(&r, i, (Strategy){ 1, GATHER_OFTEN, SUM_OFTEN });
        gather_all(&r, false, i, "unsharded");
        step_loss(&r, 0);
        keep_gradients(&r, i);
        reference[i].curve = train(&r);
        close_run(&r);
    }
}

/* ---- sharded --------------------------------------------------------------------------------- */

/* This rank's slice of the summed gradients. BATCH gradients are added in another order than in the
 * reference: each addition has a roundoff of the sum so far, bounded by the largest gradient of the
 * unit. */
static void check_gradients(const Run *r, int recipe, const char *name)
{
    for (int u = 0; u < r->store.num_units; u++) {
        const Shard *s = &r->store.shard[u];
        const size_t numel = reference[recipe].numel[u];
        if (s->slice[TRAINED].count == 0)
            continue;
        const double *found = values(s->grad), *whole = reference[recipe].grad[u];
        double size = 0;
        for (size_t i = 0; i < numel; i++)
            size = fmax(size, fabs(whole[i]));
        for (size_t i = 0; i < s->slice[TRAINED].count; i++) {
            const double expected =
                s->slice[TRAINED].first + i < numel ? whole[s->slice[TRAINED].first + i] : 0;
            if (!(fabs(found[i] - expected) <= 4 * BATCH * unit_roundoff(s->grad.format) * size))
                fail_msg("%s, %s: unit %d, element %zu: %g, expected %g (largest %g)",
                         recipe_cases[recipe].name, name, u, s->slice[TRAINED].first + i, found[i],
                         expected, size);
        }
        release();
    }
}

/* In step 0 the weights and the loss of each sequence are the reference's, bit for bit: only BATCH
 * additions in F32 have another order. Then sums of gradients have an error of e = 2 BATCH
 * roundoffs, and AdamW's step, to first order, changes the loss by e times its usual change: in F32
 * less than e of the loss in each of two steps; in BF16, where e is 1/16 and a step changes the
 * loss by 3 %, 2^-9. In FP8 a small change of a weight may change its code, by a sixteenth, so
 * there is no such bound: 2^-6, twice the observed difference, detects only diverging training. The
 * norm has the error of the sums and, as these steps change it up to four times as much as the
 * loss, four times the error of the loss. Errors of the unsharded run are not detected here:
 * gather_all checks the trained weights themselves. */
static void check_curve(const Curve *c, int recipe, Format grads, const char *name)
{
    const double sums = 2 * BATCH * unit_roundoff(grads), drift = recipe_cases[recipe].drift;
    for (int s = 0; s < STEPS; s++) {
        const double norm = reference[recipe].curve.norm[s];
        if (!(fabs(c->norm[s] - norm) <= (sums + (s > 0) * 4 * drift) * norm))
            fail_msg("%s, %s: norm %.9g in step %d, %.9g unsharded", recipe_cases[recipe].name,
                     name, c->norm[s], s, norm);
        const double expected = reference[recipe].curve.loss[s],
                     bound = s == 0 ? 2 * BATCH * U24 : drift;
        if (!(fabs(c->loss[s] - expected) <= bound * expected))
            fail_msg("%s, %s: loss %.9g in step %d, %.9g unsharded", recipe_cases[recipe].name,
                     name, c->loss[s], s, expected);
    }
}

static Curve train_with_one_queue(int recipe, Strategy strategy)
{
    Run r;
    open_run(&r, recipe, strategy);
    device_merge_queues(true);
    const Curve c = train(&r);
    device_merge_queues(false);
    close_run(&r);
    return c;
}

/* twice: compares a second run. */
static void strategy_case(int recipe, Strategy strategy, const char *name, bool twice)
{
    Run r;
    open_run(&r, recipe, strategy);
    gather_all(&r, false, recipe, name);
    step_loss(&r, 0);
    check_gradients(&r, recipe, name);
    Curve c = train(&r), again;
    gather_all(&r, true, recipe, name);
    check_curve(&c, recipe, r.store.recipe.grads, name);
    close_run(&r);

    if (twice) {
        again = train_with_one_queue(recipe, strategy);
        check_same_bytes("the same once more, with one queue", &c, &again, sizeof c);
    }
    again = c;
    comm_broadcast(&again, sizeof again, 0);
    check_same_bytes("on rank 0", &c, &again, sizeof c);
}

/* With adapters each recipe has half of the strategies: for each format of the base, its two
 * recipes cover all. */
static bool is_chosen(int recipe, int strategy)
{
    return recipe_cases[recipe].modules == 0 || comm_size() == 1 || recipe % 2 == strategy % 2;
}

static void test_strategies(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        const int groups = strategies[s].groups ? strategies[s].groups : comm_size();
        const Strategy strategy = { comm_size() / groups, strategies[s].gathering,
                                    strategies[s].sum };
        /* on one rank all strategies are the same */
        const bool new = comm_size() > 1 || s == 0;
        for (int i = 0; i < NUM_RECIPES && new && comm_size() % groups == 0; i++)
            if (is_chosen(i, s))
                strategy_case(i, strategy, strategies[s].name, (i / 2 + s) % 2 == 0);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_unsharded),
                                        cmocka_unit_test(test_strategies) };
    start_ranks(&argc, &argv);
    architecture_add(&mapped);
    unit_kind_add(&mapping_kind, 1);
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
