/* Frozen parameters on any number of ranks, under every strategy: their bytes never change, also
 * through a checkpoint; the gradients of the others have the bits of a run that trains all; a run
 * resumes bit for bit; and memory is saved. */
#include "kernels/fp8.h"
#include "kernels/runtime/comm.h"
#include "kernels/values.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "model/predict/memory.h"
#include "model/store/param_store_sizes.h"
#include "model/update/update.h"
#include "tests/kit.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

enum { BATCH = 4, MICRO = 1, STEPS = 2 };

/* Recipes, changed here so that frozen weights are rounded for computing like trained ones. */
static const struct {
    const char *name;
    Keep keep;
    DType frozen;
} recipe_rows[] = {
    { "f32", KEEP_ALL, F32 },      { "bf16", KEEP_ALL, BF16 },         { "fp8", KEEP_ALL, F32 },
    { "coat", KEEP_INPUTS, BF16 }, { "coat-lean", KEEP_INPUTS, BF16 }, { "coat", KEEP_BLOCK, BF16 },
};
enum { NUM_RECIPES = sizeof recipe_rows / sizeof recipe_rows[0] };

static const struct {
    SmallModel model;
    const char *patterns[3];
    int count, first_trained;
} choices[] = {
    { LLAMA, { "model.layers.*.mlp.*", "lm_head.weight" }, 2, 1 },
    { LLAMA_GQA, { "model.layers.1.self_attn.?_proj.weight", "model.norm.weight" }, 2, 2 },
    { OLMO2, { "*norm.weight" }, 1, 1 },
    { OLMO, { "model.embed_tokens.weight" }, 1, 0 },
    { QWEN3, { "model.layers.*.self_attn.*" }, 1, 1 },
    { LLAMA, { "lm_head.weight" }, 1, 3 },
    { QWEN2, { "*_proj.bias" }, 1, 1 },
};
enum { NUM_CHOICES = sizeof choices / sizeof choices[0] };

static const struct {
    const char *name;
    int groups;
    Gathering gathering;
    GradSum sum;
} strategies[] = {
    { "FULL_SHARD, sums per micro-batch", 1, GATHER_OFTEN, SUM_OFTEN },
    { "FULL_SHARD, sums per step", 1, GATHER_OFTEN, SUM_ONCE },
    { "SHARD_GRAD_OP", 1, GATHER_ONCE, SUM_OFTEN },
    { "HYBRID_SHARD", 2, GATHER_OFTEN, SUM_OFTEN },
    { "NO_SHARD", 0, GATHER_OFTEN, SUM_ONCE }, /* 0: a group per rank */
};
enum { NUM_STRATEGIES = sizeof strategies / sizeof strategies[0] };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    ModelConfig m;
} Run;

static void open_run(Run *r, int choice, int recipe, int strategy, bool all)
{
    const int groups = strategies[strategy].groups ? strategies[strategy].groups : comm_size();
    *r = (Run){ .m = architecture(choices[choice].model) };
    model_config(&r->config, &r->m, recipe_rows[recipe].name, MICRO);
    r->config.recipe.keep = recipe_rows[recipe].keep;
    r->config.recipe.frozen = (Format){ recipe_rows[recipe].frozen, 0, false };
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ comm_size() / groups, strategies[strategy].gathering,
                                     strategies[strategy].sum };
    r->config.trainable = (char **)choices[choice].patterns;
    r->config.num_trainable = all ? 0 : choices[choice].count;
    divide(r->config.strategy.shard_ranks);
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
    store_init(&r->store, &r->config.model, 5);
}

static double train(Run *r, int first, int steps)
{
    return train_steps(&r->model, &r->store, &r->config, first, steps);
}

/* n elements of a tensor in device memory, as doubles, exactly. */
static void fetch(double *x, Tensor t, size_t n)
{
    float *raw = keep(n * sizeof *raw), *values = keep(n * sizeof *values);
    device_get(raw, t.data, n * dtype_size(t.format.dtype));
    t.data = raw;
    tensor_load(values, t, 0, n);
    for (size_t i = 0; i < n; i++)
        x[i] = values[i];
}

/* ---- the whole state of a run, on every rank; one run at a time is open ---------------------- */

enum { MAX_UNITS = 4 };

typedef struct {
    Region region[MAX_UNITS][NUM_PARAMS];
    double *x[MAX_UNITS][NUM_PARAMS];
    size_t numel[MAX_UNITS][NUM_PARAMS];
} State;

/* Gradients, or weights as stored, of all shards: for each element one rank of a group has the
 * value, the others 0. */
static State *take(const Run *r, bool grads)
{
    State *state = calloc(1, sizeof *state);
    assert_true(state && r->store.num_units <= MAX_UNITS);
    for (int u = 0; u < r->store.num_units; u++)
        for (int i = 0; i < r->store.shape[u].num_params; i++) {
            const Shard *s = &r->store.shard[u];
            const Param *p = &r->store.shape[u].param[i];
            const size_t numel = (size_t)p->rows * (size_t)p->cols;
            size_t first, n = shard_part(s, p, &first);
            double *x = state->x[u][p->id] = calloc(numel, sizeof *x);
            assert_non_null(x);
            state->region[u][p->id] = p->region;
            state->numel[u][p->id] = numel;
            if (n > 0 && !(grads && p->region == FROZEN))
                fetch(x + first,
                      grads ? slice_view(&s->slice[TRAINED], s->grad, p->offset + first, n)
                            : shard_weights(s, p, first, n),
                      n);
            comm_sum_over(x, (int)numel, RANKS_SHARD);
            release();
        }
    return state;
}

static void drop(State *s)
{
    for (int u = 0; u < MAX_UNITS; u++)
        for (int i = 0; i < NUM_PARAMS; i++)
            free(s->x[u][i]);
    free(s);
}

static bool is_same(const State *a, const State *b, int u, int i)
{
    return memcmp(a->x[u][i], b->x[u][i], a->numel[u][i] * sizeof(double)) == 0;
}

/* Parameters trained in a are equal in both. */
static void check_trained(const State *a, const State *b, const char *what)
{
    for (int u = 0; u < MAX_UNITS; u++)
        for (int i = 0; i < NUM_PARAMS; i++)
            if (a->x[u][i] && a->region[u][i] == TRAINED && !is_same(a, b, u, i))
                fail_msg("%s: unit %d, parameter %d differs", what, u, i);
}

/* Frozen parameters have not changed, trained ones have. */
static void check_frozen(const State *now, const State *before)
{
    for (int u = 0; u < MAX_UNITS; u++)
        for (int i = 0; i < NUM_PARAMS; i++)
            if (now->x[u][i] && is_same(now, before, u, i) != (now->region[u][i] == FROZEN))
                fail_msg("unit %d, parameter %d is %s", u, i,
                         now->region[u][i] == FROZEN ? "frozen but has changed"
                                                     : "trained but has not changed");
}

/* ---- the tests ------------------------------------------------------------------------------- */

/* NOTE: an element's sum over ranks begins with its owner, which may be another rank with fewer
 * parameters. So gradients of one micro-batch per rank are compared, and with NCCL, whose order
 * depends on the owner, on up to two ranks. */
static void strategy_case(int choice, int recipe, int strategy)
{
    Run r;
    open_run(&r, choice, recipe, strategy, true);
    const size_t bytes = model_planned_bytes(&r.model, &r.store);
    forward_backward(&r.model, &r.store, &r.config, 0, 1);
    State *all = take(&r, true);
    model_free(&r.model, &r.store);

    open_run(&r, choice, recipe, strategy, false);
    assert_int_equal(r.store.first_trained, choices[choice].first_trained);
    assert_true(model_planned_bytes(&r.model, &r.store) < bytes);
    State *before = take(&r, false);
    forward_backward(&r.model, &r.store, &r.config, 0, 1);
    State *some = take(&r, true);
    if (on_cpu() || comm_size() <= 2)
        check_trained(some, all, strategies[strategy].name);
    train(&r, 0, STEPS);
    State *after = take(&r, false);
    check_frozen(after, before);
    model_free(&r.model, &r.store);
    drop(all), drop(some), drop(before), drop(after);
}

static void test_strategies(void **state)
{
    (void)state;
    /* of several ranks, any two of strategy, recipe and choice meet */
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        const int groups = strategies[s].groups ? strategies[s].groups : comm_size();
        /* on one rank all strategies are the same */
        const bool new = comm_size() > 1 || s == 0;
        for (int i = 0; i < NUM_RECIPES && new && comm_size() % groups == 0; i++)
            for (int c = 0; c < NUM_CHOICES; c++)
                if (comm_size() == 1 || (s + i + c) % 2 == 0)
                    strategy_case(c, i, s);
    }
}

/* A resume equals an uninterrupted run, and frozen parameters are restored. */
static void test_checkpoint(void **state)
{
    (void)state;
    char path[64];
    assert_int_equal(make_shared(NULL), 0);
    snprintf(path, sizeof path, "%s/step%d", shared, STEPS);
    for (int i = 0; i < NUM_RECIPES; i++) {
        Run r;
        open_run(&r, 0, i, 0, false);
        State *before = take(&r, false);
        train(&r, 0, STEPS);
        r.config.save_folder = shared;
        r.config.save_num_checkpoints_to_keep = -1;
        r.config.text = "run_name: test\n";
        TrainState s = { .step = STEPS }, loaded = { 0 };
        checkpoint_begin(&r.config, &r.store, &s, CHECKPOINT_FILE_BYTES);
        checkpoint_finish();
        const double expected = train(&r, STEPS, STEPS);
        State *after = take(&r, false);
        model_free(&r.model, &r.store);

        open_run(&r, 0, i, 0, false);
        assert_true(checkpoint_load(path, &r.config, &r.store, &loaded, true));
        assert_true(loaded.step == STEPS && r.store.counts.updates == STEPS);
        const double found = train(&r, STEPS, STEPS);
        State *again = take(&r, false);
        assert_memory_equal(&expected, &found, sizeof found);
        check_trained(after, again, "a resumed run");
        check_frozen(again, before);
        model_free(&r.model, &r.store);
        drop(before), drop(after), drop(again);
    }
    assert_int_equal(remove_shared(NULL), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_strategies),
                                        cmocka_unit_test(test_checkpoint) };
    start_ranks(&argc, &argv);
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
