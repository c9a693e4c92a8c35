/* Runs with adapters on any number of ranks, under every strategy, with a base in each format: they
 * resume bit for bit; their base is read only from its own folder, and its bytes never change. Run
 * with 1, 2 and 4 ranks. */
#include <sys/stat.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/store/param_store_sizes.h"
#include "model/store/quantized_weights.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/model.h"
#include "model/predict/memory.h"
#include "model/update/update.h"
#include "tests/kit.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

enum { BATCH = 4, STEPS = 2, MAX_UNITS = 4 };

static const struct {
    SmallModel model;
    const char *recipe, *optimizer;
    BaseFormat base;
    int groups;
    Gathering gathering;
    GradSum sum;
} rows[] = {
    /* 0: a group per rank */
    { LLAMA, "f32", "adamw", BASE_AS_FROZEN, 1, GATHER_OFTEN, SUM_OFTEN },
    { MISTRAL, "coat", "adamw", BASE_AS_FROZEN, 1, GATHER_ONCE, SUM_OFTEN },
    { OLMO2, "coat-lean", "adamw", BASE_E4M3, 1, GATHER_OFTEN, SUM_ONCE },
    { LLAMA_GQA, "bf16", "adamw8bit", BASE_NF4, 2, GATHER_OFTEN, SUM_OFTEN },
    { OLMO3, "coat-lean", "adamw", BASE_NF4, 0, GATHER_OFTEN, SUM_ONCE },
};
enum { ROWS = sizeof rows / sizeof rows[0] };

static const char *path_of(int row, const char *what)
{
    static char path[4][128];
    static unsigned next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%d%s", shared, row, what);
    return p;
}

/* ---- runs ------------------------------------------------------------------------------------ */

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    ModelConfig m;
} Run;

static void open_run(Run *r, int row, bool adapted)
{
    const int groups = rows[row].groups ? rows[row].groups : comm_size();
    *r = (Run){ .m = architecture(rows[row].model) };
    if (adapted) {
        r->m.lora = (Lora){ .rank = 4,
                            .alpha = 8,
                            .base = rows[row].base,
                            .base_path = (char *)path_of(row, "base/step0") };
        memset(r->m.lora.target, 1, sizeof r->m.lora.target);
        r->m.lora.base_path = strdup(r->m.lora.base_path);
    }
    model_config(&r->config, &r->m, rows[row].recipe, 1);
    r->config.optimizer.name = (char *)rows[row].optimizer;
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ comm_size() / groups, rows[row].gathering, rows[row].sum };
    r->config.save_folder = strdup(path_of(row, adapted ? "" : "base"));
    r->config.save_num_checkpoints_to_keep = -1;
    r->config.text = "run_name: test\n";
    divide(r->config.strategy.shard_ranks);
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
}

static void close_run(Run *r)
{
    free(r->config.save_folder);
    free(r->m.lora.base_path);
    model_free(&r->model, &r->store);
    release();
}

static void save(Run *r, int step)
{
    const TrainState s = { .step = step };
    if (comm_rank() == 0 && step == 0)
        assert_int_equal(mkdir(r->config.save_folder, 0777), 0);
    comm_barrier();
    checkpoint_begin(&r->config, &r->store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
}

static double train(Run *r, int first, int steps)
{
    return train_steps(&r->model, &r->store, &r->config, first, steps);
}

/* ---- what this rank has ---------------------------------------------------------------------- */

enum { MASTER, STATE0, STATE1, FROZEN_PART, QUANTIZED_PART, PARTS };
typedef struct {
    char *bytes[MAX_UNITS][PARTS];
    size_t size[MAX_UNITS][PARTS];
} State;

static void take_part(State *s, int u, int part, const void *data, size_t size)
{
    s->size[u][part] = size;
    s->bytes[u][part] = calloc(size + 1, 1);
    if (size)
        device_get(s->bytes[u][part], data, size);
}

/* Padding of 8-bit states may have any code that is 0. */
static void clear_padding(State *s, int u, int part, const ParamStore *store, size_t size)
{
    const Shard *h = &store->shard[u];
    const size_t begin = h->slice[TRAINED].first;
    char *all = s->bytes[u][part], *kept = calloc(s->size[u][part] + 1, 1);
    for (int i = 0; i < store->shape[u].num_params; i++) {
        const Param *p = &store->shape[u].param[i];
        size_t first, n = p->region == TRAINED ? shard_part(h, p, &first) : 0;
        if (n > 0)
            memcpy(kept + (p->offset + first - begin) * size,
                   all + (p->offset + first - begin) * size, n * size);
    }
    s->bytes[u][part] = kept;
    free(all);
}

static State *take(const Run *r)
{
    State *s = calloc(1, sizeof *s);
    assert_true(s && r->store.num_units <= MAX_UNITS);
    for (int u = 0; u < r->store.num_units; u++) {
        const Shard *h = &r->store.shard[u];
        const Tensor t[] = { h->slice[TRAINED].stored, h->state[0], h->state[1],
                             h->slice[FROZEN].stored };
        for (int i = 0; i <= FROZEN_PART; i++) {
            take_part(s, u, i, t[i].data,
                      t[i].cols > 0 ? tensor_numel(t[i]) * dtype_size(t[i].format.dtype) : 0);
            if (i < FROZEN_PART)
                clear_padding(s, u, i, &r->store, dtype_size(t[i].format.dtype));
        }
        take_part(s, u, QUANTIZED_PART, h->slice[QUANTIZED].stored.data, h->slice[QUANTIZED].count);
    }
    return s;
}

static void drop(State *s)
{
    for (int u = 0; u < MAX_UNITS; u++)
        for (int i = 0; i < PARTS; i++)
            free(s->bytes[u][i]);
    free(s);
}

static bool is_same(const State *a, const State *b, int first, int last)
{
    bool same = true;
    for (int u = 0; u < MAX_UNITS; u++)
        for (int i = first; i <= last; i++)
            same &= a->size[u][i] == b->size[u][i] &&
                    (!a->size[u][i] || memcmp(a->bytes[u][i], b->bytes[u][i], a->size[u][i]) == 0);
    return same;
}

/* ---- the tests ------------------------------------------------------------------------------- */

static void save_base(int row)
{
    Run r;
    open_run(&r, row, false);
    store_init(&r.store, &r.config.model, 5);
    save(&r, 0);
    close_run(&r);
}

static void resume_case(int row)
{
    Run r;
    TrainState loaded = { 0 };
    save_base(row);
    open_run(&r, row, true);
    assert_false(checkpoint_load(r.m.lora.base_path, &r.config, &r.store, &loaded, true));
    if (comm_rank() == 0)
        assert_int_equal(mkdir(r.config.save_folder, 0777), 0);
    State *before = take(&r);
    train(&r, 0, STEPS);
    save(&r, STEPS);
    State *at_save = take(&r);
    const double expected = train(&r, STEPS, STEPS);
    State *after = take(&r);
    assert_true(is_same(before, after, FROZEN_PART, QUANTIZED_PART));
    /* a rank may have no trained elements */
    double changed = !is_same(before, after, MASTER, STATE1);
    comm_max(&changed, 1);
    assert_true(changed > 0);
    close_run(&r);

    open_run(&r, row, true);
    assert_true(checkpoint_load(path_of(row, "/step2"), &r.config, &r.store, &loaded, true));
    assert_int_equal(loaded.step, STEPS);
    State *found = take(&r);
    assert_true(is_same(found, at_save, MASTER, QUANTIZED_PART));
    const double loss = train(&r, STEPS, STEPS);
    State *again = take(&r);
    assert_memory_equal(&loss, &expected, sizeof loss);
    assert_true(is_same(again, after, MASTER, QUANTIZED_PART));
    close_run(&r);
    drop(before), drop(at_save), drop(after), drop(found), drop(again);
}

static void test_resume(void **state)
{
    (void)state;
    for (int i = 0; i < ROWS; i++)
        if (comm_size() % (rows[i].groups ? rows[i].groups : comm_size()) == 0)
            resume_case(i);
}

/* A single rank reads the checkpoint of all ranks: the same adapters, and it saves the same
 * file. */
static void test_other_ranks(void **state)
{
    (void)state;
    for (int i = 0; i < ROWS; i++) {
        if (comm_size() % (rows[i].groups ? rows[i].groups : comm_size()) != 0)
            continue;
        Run r;
        TrainState loaded;
        open_run(&r, i, true);
        model_free(&r.model, &r.store);
        divide(1);
        r.config.strategy.shard_ranks = 1;
        memory_plan(&r.model, &r.store, &r.config);
        model_alloc(&r.model, &r.store, &r.config);
        assert_true(checkpoint_load(path_of(i, "/step2"), &r.config, &r.store, &loaded, true));
        save(&r, STEPS + 1);
        char command[512];
        snprintf(
            command, sizeof command,
            "cd %s/%d && cmp step2/adapter_model.safetensors step3/adapter_model.safetensors && "
            "cmp step2/optimizer-00001.states step3/optimizer-00001.states",
            shared, i);
        if (comm_rank() == 0)
            assert_int_equal(system(command), 0);
        comm_barrier();
        close_run(&r);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_resume),
                                        cmocka_unit_test(test_other_ranks) };
    start_ranks(&argc, &argv);
    return finish_ranks(cmocka_run_group_tests(tests, make_shared, remove_shared));
}
