/* Adapters on any number of ranks, under every strategy, on a base in every format: training does
 * not change a byte of the base, and changes every A and B; a run resumes bit for bit from its
 * folder of adapters and that of its base. test_fsdp_ranks compares the strategies. */
#include <sys/stat.h>

#include "kernels/runtime/comm.h"
#include "model/store/param_store_sizes.h"
#include "model/store/quantized_weights.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/update/update.h"
#include "tests/kit.h"
#include "tests/ranks_run.h"

enum { BATCH = 4, MICRO = 1, STEPS = 2, UNITS = 4, RANK = 6 };

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
enum {
    SOME = 1 << LORA_K | 1 << LORA_O | 1 << LORA_UP,
    NUM_STRATEGIES = sizeof strategies / sizeof strategies[0]
};

static const struct {
    const char *recipe;
    SmallModel model;
    unsigned modules;
    BaseFormat base;
    bool plain_nf4;
} cases[] = {
    { "bf16", LLAMA, ALL_MODULES, BASE_AS_FROZEN },
    { "coat", OLMO2, SOME, BASE_AS_FROZEN },
    { "bf16", LLAMA_GQA, ALL_MODULES, BASE_E4M3 },
    { "coat-lean", LLAMA, 1 << LORA_Q | 1 << LORA_V, BASE_E4M3 },
    { "fp8", QWEN3, ALL_MODULES, BASE_NF4 },
    { "coat-lean", OLMO3, ALL_MODULES, BASE_NF4 },
    { "coat", QWEN2, ALL_MODULES, BASE_E4M3 },
    { "bf16", OLMO, SOME, BASE_NF4, true },
    { "coat", LLAMA_GQA, ALL_MODULES, BASE_NF4, true },
};
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

static void open_run(Run *r, const ModelConfig *m, const char *recipe, int strategy, char *folder)
{
    const int groups = strategies[strategy].groups ? strategies[strategy].groups : comm_size();
    *r = (Run){ 0 };
    model_config(&r->config, m, recipe, MICRO);
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ comm_size() / groups, strategies[strategy].gathering,
                                     strategies[strategy].sum };
    r->config.save_folder = folder;
    r->config.save_num_checkpoints_to_keep = -1;
    r->config.text = "run_name: test\n";
    divide(r->config.strategy.shard_ranks);
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
}

static void save(Run *r, long step)
{
    const TrainState s = { .step = step };
    checkpoint_begin(&r->config, &r->store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
}

/* The sum of the losses of this rank's tokens over these steps. */
static double train(Run *r, int first, int steps)
{
    return train_steps(&r->model, &r->store, &r->config, first, steps);
}

/* ---- what a rank has ------------------------------------------------------------------------- */

/* Host copies, until release(). */
typedef struct {
    void *adapter[UNITS], *frozen[UNITS], *base[UNITS];
    size_t adapter_bytes[UNITS], frozen_bytes[UNITS], base_bytes[UNITS];
} Stored;

static void *copy(const void *device, size_t bytes)
{
    void *host = keep(bytes);
    if (bytes > 0)
        device_get(host, device, bytes);
    return host;
}

static Stored take(const Run *r)
{
    Stored x = { 0 };
    assert_int_equal(r->store.num_units, UNITS);
    for (int u = 0; u < UNITS; u++) {
        const Shard *s = &r->store.shard[u];
        x.adapter_bytes[u] =
            s->slice[TRAINED].count * dtype_size(s->slice[TRAINED].stored.format.dtype);
        x.frozen_bytes[u] =
            s->slice[FROZEN].count * dtype_size(s->slice[FROZEN].stored.format.dtype);
        x.base_bytes[u] = s->slice[QUANTIZED].count;
        x.adapter[u] = copy(s->slice[TRAINED].stored.data, x.adapter_bytes[u]);
        x.frozen[u] = copy(s->slice[FROZEN].stored.data, x.frozen_bytes[u]);
        x.base[u] = copy(s->slice[QUANTIZED].stored.data, x.base_bytes[u]);
    }
    return x;
}

static void check_base(const Stored *now, const Stored *before, const char *what)
{
    for (int u = 0; u < UNITS; u++) {
        check_same_bytes(what, now->frozen[u], before->frozen[u], before->frozen_bytes[u]);
        check_same_bytes(what, now->base[u], before->base[u], before->base_bytes[u]);
    }
}

/* This rank's part of every A and B has changed. */
static void check_trained(const Run *r, const Stored *now, const Stored *before)
{
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < r->store.shape[u].num_params; i++) {
            const Param *p = &r->store.shape[u].param[i];
            const Shard *s = &r->store.shard[u];
            const size_t size = dtype_size(s->slice[TRAINED].stored.format.dtype);
            size_t first, n = shard_part(s, p, &first);
            if (!p->is_adapter || n == 0)
                continue;
            assert_int_equal(p->region, TRAINED);
            const size_t at = (p->offset + first - s->slice[TRAINED].first) * size;
            assert_memory_not_equal((char *)now->adapter[u] + at, (char *)before->adapter[u] + at,
                                    n * size);
        }
}

/* ---- the test -------------------------------------------------------------------------------- */

/* A folder visible to all ranks, until release(). */
static char *make_folder(const char *name, int c, int strategy)
{
    char *p = keep(256);
    snprintf(p, 256, "%s/%s-%d-%d", shared, name, c, strategy);
    if (comm_rank() == 0)
        assert_int_equal(mkdir(p, 0777), 0);
    comm_barrier();
    return p;
}

/* On one rank nothing is sharded: keeping weights changes no bit. */
static void check_alone(int c, int strategy, double loss)
{
    static double first[NUM_CASES];
    if (strategy == 0)
        first[c] = loss;
    else
        check_same_bytes("the loss of one rank that keeps weights", &loss, &first[c], sizeof loss);
}

static void check_case(int c, int strategy)
{
    const ModelConfig plain = architecture(cases[c].model);
    ModelConfig m = with_adapters(plain, RANK, cases[c].modules, cases[c].base);
    m.lora.plain_nf4 = cases[c].plain_nf4;
    char *whole = make_folder("base", c, strategy), *folder = make_folder("lora", c, strategy),
         base[300], step[300];
    TrainState loaded = { 0 };
    Run r;
    open_run(&r, &plain, cases[c].recipe, strategy, whole);
    store_init(&r.store, &r.config.model, 5);
    save(&r, 0);
    close_run(&r);

    snprintf(base, sizeof base, "%s/step0", whole);
    snprintf(step, sizeof step, "%s/step%d", folder, STEPS);
    m.lora.base_path = base;
    open_run(&r, &m, cases[c].recipe, strategy, folder);
    assert_false(checkpoint_load(base, &r.config, &r.store, &loaded, true));
    const Stored before = take(&r);
    train(&r, 0, STEPS);
    save(&r, STEPS);
    const double expected = train(&r, STEPS, STEPS);
    const Stored after = take(&r);
    check_base(&after, &before, strategies[strategy].name);
    check_trained(&r, &after, &before);
    if (comm_size() == 1)
        check_alone(c, strategy, expected);
    close_run(&r);

    open_run(&r, &m, cases[c].recipe, strategy, folder);
    assert_true(checkpoint_load(step, &r.config, &r.store, &loaded, true));
    assert_int_equal(loaded.step, STEPS);
    const double found = train(&r, STEPS, STEPS);
    const Stored again = take(&r);
    check_same_bytes("the loss of a resumed run", &found, &expected, sizeof found);
    check_base(&again, &before, "a resumed run");
    for (int u = 0; u < UNITS; u++)
        check_same_bytes("a resumed run's adapters", again.adapter[u], after.adapter[u],
                         after.adapter_bytes[u]);
    close_run(&r);
    release();
}

/* Each recipe has half of the strategies: for each format of the base, its two recipes cover
 * all. */
static bool is_chosen(int c, int strategy)
{
    return comm_size() == 1 || c % 2 == strategy % 2;
}

static void test_strategies(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        const int groups = strategies[s].groups ? strategies[s].groups : comm_size();
        /* On one rank the others equal the first. */
        const bool new = comm_size() > 1 || s == 0 || strategies[s].gathering == GATHER_ONCE;
        for (int c = 0; c < NUM_CASES && new && comm_size() % groups == 0; c++)
            if (is_chosen(c, s))
                check_case(c, s);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_strategies) };
    start_ranks(&argc, &argv);
    return finish_ranks(cmocka_run_group_tests(tests, make_shared, remove_shared));
}
