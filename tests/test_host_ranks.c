/* CPU offload. Offloaded tensors change no bit; only tensors that do not fit on the device are
 * offloaded; each moves once in each direction per step. On 1, 2 and 4 ranks. (test_cpu_order_ranks
 * checks that each copy waits for its inputs.) */
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/host_memory.h"
#include "kernels/runtime/operations.h"
#include "kernels/values.h"
#include "model/plan_model.h"
#include "model/store/offload.h"
#include "model/store/param_store_sizes.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/ranks_state.h"

enum { LAYERS = 6, STEPS = 2, MICRO_BATCHES = 2 };

typedef struct {
    double loss[2 * STEPS], norm[STEPS];
    Stored weights;
} Result;

static void open_case(Run *r, const Case *k, Keep keep, Strategy s)
{
    configure(r, k, with_sizes(architecture(k->model), 64, 16, 80, LAYERS), s);
    r->config.global_train_batch_size = MICRO_BATCHES * comm_size();
    r->config.recipe.keep = keep;
}

/* Runs steps of micro-batches. After each step runs an evaluation, which saves no activations. */
static Result train(Run *r)
{
    Result result = { 0 };
    for (int s = 0; s < STEPS; s++) {
        result.norm[s] = train_step(r, s);
        result.loss[2 * s] = take_loss(r);
        result.loss[2 * s + 1] = evaluation_loss(r);
    }
    result.weights = take_stored(&r->store);
    close_run(r);
    return result;
}

static void check_same(const char *row, int number, const Result *a, const Result *b)
{
    char what[64];
    snprintf(what, sizeof what, "%s, row %d", row, number);
    check_same_bytes(what, a->loss, b->loss, sizeof a->loss);
    check_same_bytes(what, a->norm, b->norm, sizeof a->norm);
    check_stored(what, &b->weights, &a->weights, TRAINED);
}

/* ---- activations ----------------------------------------------------------------------------- */

static const struct {
    Case k;
    Keep keep;
    int tile;
} kinds[] = {
    { { 0 }, KEEP_ALL },
    { { 0 }, KEEP_INPUTS },
    { { 0 }, KEEP_BLOCK },
    { { 0 }, KEEP_ATTENTION },
    { { .recompute = 2 }, KEEP_INPUTS },
    { { .recompute = -3 }, KEEP_INPUTS },
    { { .trainable = { "model.layers.[2-9]*" } }, KEEP_INPUTS },
    { { .trainable = { "model.layers.1.mlp*" } }, KEEP_BLOCK },
    { { .modules = ALL_MODULES }, KEEP_INPUTS },
    { { .modules = ALL_MODULES }, KEEP_BLOCK },
    { { .modules = ALL_MODULES }, KEEP_ATTENTION },
    { { 0 }, KEEP_BLOCK, .tile = 16 },
    { { 0 }, KEEP_ATTENTION, .tile = 16 },
};

static void open_kind(Run *r, int number, SmallModel a, const char *recipe, HostUse use)
{
    static Case k;
    k = kinds[number].k;
    k.model = a;
    k.recipe = recipe;
    k.base = strcmp(recipe, "f32") ? BASE_E4M3 : BASE_AS_FROZEN;
    open_case(r, &k, kinds[number].keep, mesh(1, 1, 1));
    r->config.tiled_mlp_tokens = kinds[number].tile;
    r->config.offload.activations = use;
}

/* Backward reads nothing of frozen blocks below the first trained block, so the host has no memory
 * for them. */
static void check_frozen_stay(const Run *r)
{
    for (int u = 0; u < r->store.first_trained; u++)
        assert_false(r->model.sets[u].on_host);
}

TEST(test_activations)
{
    static const char *const recipes[] = { "f32", "fp8", "coat", "coat-lean" };
    static const SmallModel models[] = { LLAMA_GQA, OLMO2, QWEN3, OLMO };
    for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++)
        for (int i = 0; i < 4; i++) {
            Run r;
            const SmallModel a = models[(i + k) % 4];
            open_kind(&r, k, a, recipes[i], HOST_NEVER);
            place_run(&r);
            const size_t bytes = r.model.bytes.total;
            assert_int_equal(offload_host_bytes(&r.model), 0);
            const Result there = train(&r);

            open_kind(&r, k, a, recipes[i], HOST_ALL);
            place_run(&r);
            assert_int_equal(r.model.offload.slots, MIN_SLOTS);
            assert_true(offload_host_bytes(&r.model) > 0);
            check_frozen_stay(&r);
            /* slots are as large as the largest block */
            assert_true(kinds[k].k.recompute || r.model.bytes.total < bytes);
            const Result moved = train(&r);
            check_same("activations", k, &there, &moved);
            release();
        }
}

/* ---- weights and states ---------------------------------------------------------------------- */

static const struct {
    Case k;
    Keep keep;
} states[] = {
    { { "f32", LLAMA }, KEEP_ALL },
    { { "bf16", OLMO2, .optimizer = "adamw8bit" }, KEEP_ALL },
    { { "fp8", QWEN3 }, KEEP_BLOCK },
    { { "coat", LLAMA_GQA }, KEEP_INPUTS },
    { { "coat-lean", OLMO }, KEEP_BLOCK },
    { { "coat", OLMO3, .optimizer = "adamw8bit" }, KEEP_INPUTS },
    { { "fp8-lm", LLAMA }, KEEP_ALL },
    { { "coat", LLAMA, .trainable = { "model.layers.[2-4].mlp*" } }, KEEP_INPUTS },
    { { "bf16", OLMO2, .trainable = { "*.self_attn.*" } }, KEEP_ALL },
    { { "bf16", LLAMA_GQA, ALL_MODULES }, KEEP_ALL },
    { { "coat", OLMO2, ALL_MODULES }, KEEP_INPUTS },
    { { "bf16", QWEN3, ALL_MODULES, BASE_E4M3 }, KEEP_BLOCK },
    { { "coat-lean", LLAMA, ALL_MODULES, BASE_E4M3 }, KEEP_INPUTS },
    { { "bf16", LLAMA, ALL_MODULES, BASE_NF4 }, KEEP_ALL },
    { { "coat", LLAMA_GQA, ALL_MODULES, BASE_NF4 }, KEEP_BLOCK },
    { { "coat-lean", OLMO3, ALL_MODULES, BASE_NF4 }, KEEP_INPUTS },
    { { "fp8", QWEN2, .optimizer = "adamw8bit" }, KEEP_BLOCK },
    { { "coat", QWEN2, ALL_MODULES, BASE_NF4 }, KEEP_INPUTS },
};

/* Returns how much is offloaded: nothing, all, or what a device of this many bytes needs. */
static void open_states(Run *r, int i, Strategy s, HostUse use, double memory)
{
    open_case(r, &states[i].k, states[i].keep, s);
    r->config.offload.frozen = r->config.offload.optimizer = r->config.offload.master = use;
    r->config.device_memory = memory / (1 << 30);
}

/* Returns the bytes of a device that the plan just fits. */
static double fit_bytes(Run *r)
{
    r->config.device_memory = 1; /* as if it were a GPU */
    return (double)model_planned_bytes(&r->model, &r->store) + memory_allowance(&r->config) + 0.5;
}

static int units_on_host(const ParamStore *store, Hosted h)
{
    int count = 0;
    for (int u = 0; u < store->num_units; u++)
        count += store_on_host(store, u, h);
    return count;
}

/* Everything that can be offloaded is: only tensors of layers, except for the optimizer's
 * states. */
static void check_moved(int i, const Run *r)
{
    const ParamStore *store = &r->store;
    const Case *k = &states[i].k;
    const bool frozen = k->modules || k->trainable[0],
               smaller = strcmp(k->recipe, "f32") && !k->modules;
    int operands = 0;
    for (int u = 1; u <= LAYERS; u++)
        for (int p = 0; p < store->shape[u].num_params; p++)
            if (store->shape[u].param[p].is_operand && store->shape[u].param[p].region == TRAINED) {
                operands++;
                break;
            }
    const bool narrower = smaller && dtype_size(r->config.recipe.operand.dtype) <
                                         dtype_size(r->config.recipe.master.dtype);
    assert_int_equal(units_on_host(store, HOST_MASTER), narrower ? operands : 0);
    assert_int_equal(units_on_host(store, HOST_FROZEN) > 0, frozen);
    assert_true(units_on_host(store, HOST_MOMENTS) > 0);
}

TEST(test_states)
{
    for (int i = 0; i < (int)(sizeof states / sizeof *states); i++) {
        const int ranks = comm_size();
        const Strategy choices[] = { { ranks, GATHER_OFTEN, SUM_OFTEN },
                                     { ranks, GATHER_ONCE, SUM_ONCE },
                                     { 1, GATHER_OFTEN, SUM_OFTEN },
                                     { ranks > 2 ? 2 : 1, GATHER_OFTEN, SUM_ONCE } };
        const Strategy s = choices[i % (ranks > 1 ? 4 : 2)];
        Run r;
        open_states(&r, i, s, HOST_NEVER, 0);
        place_run(&r);
        const double none = fit_bytes(&r);
        assert_int_equal(store_host_bytes(&r.store, NUM_HOSTED), 0);
        const Result there = train(&r);

        open_states(&r, i, s, HOST_ALL, 0);
        place_run(&r);
        const double all = fit_bytes(&r);
        check_moved(i, &r);
        Result moved = train(&r);
        check_same("all states", i, &there, &moved);

        if (i % 3 == 0) {
            open_states(&r, i, s, HOST_AUTO, (none + 3 * all) / 4);
            place_run(&r);
            assert_true(all >= none || store_host_bytes(&r.store, NUM_HOSTED) > 0);
            moved = train(&r);
            check_same("some states", i, &there, &moved);
        }
        release();
    }
}

/* If a rank's part of a block is only a norm, its states have groups that reach into the
 * padding. */
TEST(test_small_parts)
{
    static const Case k = { "bf16", LLAMA,
                            .trainable = { "*.self_attn.o_proj.weight", "*norm.weight" },
                            .optimizer = "adamw8bit" };
    Run r;
    open_case(&r, &k, recipe_find(k.recipe)->keep, mesh(1, 1, 1));
    r.config.model.d_model = r.config.model.head_dim = 16;
    r.config.model.n_heads = r.config.model.n_kv_heads = 1;
    r.config.offload.optimizer = r.config.offload.master = HOST_ALL;
    place_run(&r);
    train(&r);
    release();
}

/* States that just fit stay on the device, even if offloading the first unit would cost more memory
 * than it saves. */
TEST(test_fits)
{
    for (int i = 0; i < (int)(sizeof states / sizeof *states); i++)
        for (int k = 0; k < 2; k++) {
            Run r;
            open_states(&r, i, mesh(1, 1, 1), HOST_NEVER, 0);
            r.config.recipe.recompute = k ? 2 : 0;
            memory_plan(&r.model, &r.store, &r.config);
            const double bytes = fit_bytes(&r);
            close_run(&r);
            open_states(&r, i, mesh(1, 1, 1), HOST_AUTO, bytes);
            r.config.offload.activations = HOST_AUTO;
            r.config.recipe.recompute = k ? 2 : 0;
            memory_plan(&r.model, &r.store, &r.config);
            assert_int_equal(store_host_bytes(&r.store, NUM_HOSTED) + offload_host_bytes(&r.model),
                             0);
            r.config.device_memory = 1e-3;
            close_run(&r);
            memory_plan(&r.model, &r.store, &r.config);
            assert_true(states[i].k.modules || fit_bytes(&r) < bytes);
            close_run(&r);
        }
}

/* ---- only what does not fit on the device ---------------------------------------------------- */

/* copies to the host, and back; late: a block comes back after more backward passes than it
 * should */
static struct {
    int count[2], backward;
    size_t bytes[2];
    const char *host;
    size_t size;
    int slots;
    bool late;
} moved;

static bool count_copy(void *none, const Operation *o)
{
    (void)none;
    moved.backward += strcmp(o->name, "attention_backward") == 0;
    for (int i = 0; i < o->count && strcmp(o->name, "device_copy") == 0; i++)
        if (o->access[i].at >= moved.host && o->access[i].at < moved.host + moved.size) {
            const bool back = o->access[i].how & READS;
            const int leave = LAYERS - moved.slots, micro_batch = moved.count[1] / leave,
                      number = moved.count[1] % leave;
            moved.late |= back && moved.backward != micro_batch * LAYERS + 2 + number;
            moved.count[back]++;
            moved.bytes[back] += o->access[i].bytes;
        }
    return true;
}

static void ignore_end(void *none, const Operation *o)
{
    (void)none, (void)o;
}

/* If the device has memory for this many slots, as many blocks stay. Each other block moves once in
 * each direction per micro-batch. Blocks come back after two blocks have had their backward passes,
 * one after each further pass. */
TEST(test_auto)
{
    static const Watch watch = { count_copy, ignore_end, NULL };
    for (int slots = LAYERS; slots >= MIN_SLOTS - 1; slots--) {
        Run r;
        open_kind(&r, 1, LLAMA, "coat", HOST_AUTO);
        Model m;
        ParamStore store;
        const ShardChoice p = { comm_size(), comm_rank(),
                                .slots = slots > MIN_SLOTS ? slots : MIN_SLOTS };
        model_plan(&m, &store, &r.config, p);
        model_replan(&m, &store, &r.config, p);
        r.config.device_memory = 1;
        r.config.device_memory =
            ((double)model_planned_bytes(&m, &store) + memory_allowance(&r.config) + 0.5) /
            (1 << 30);
        if (slots < MIN_SLOTS)
            r.config.device_memory = 1e-3; /* nothing fits: the smallest number of slots */
        model_free(&m, &store);
        place_run(&r);
        const int expected = slots > MIN_SLOTS ? slots : MIN_SLOTS, leave = LAYERS - expected;
        assert_int_equal(r.model.offload.slots, expected);
        memset(&moved, 0, sizeof moved);
        moved.host = r.model.offload.host;
        moved.size = offload_host_bytes(&r.model);
        moved.slots = expected;
        const Watch *before = operations_watch(&watch);
        forward_backward(&r, 0, MICRO_BATCHES);
        operations_watch(before);
        assert_false(moved.late);
        for (int back = 0; back < 2; back++) {
            assert_int_equal(moved.count[back], MICRO_BATCHES * leave);
            assert_int_equal(moved.bytes[back], MICRO_BATCHES * moved.size);
        }
        close_run(&r);
    }
}

/* ---- memory of the host ---------------------------------------------------------------------- */

static char folder[] = "/tmp/coat-host-XXXXXX";

static void write_text(const char *path, const char *text)
{
    char name[256];
    snprintf(name, sizeof name, "%s/%s", folder, path);
    for (char *c = name + strlen(folder) + 1; (c = strchr(c, '/')); c++) {
        *c = '\0';
        mkdir(name, 0755);
        *c = '/';
    }
    FILE *f = fopen(name, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

TEST(test_host_memory)
{
    if (comm_rank() > 0)
        return;
    assert_non_null(mkdtemp(folder));
    assert_true(isinf(host_memory_left(folder)));
    write_text("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:    4000 kB\n");
    assert_true(host_memory_left(folder) == 4000 * 1024);
    write_text("proc/self/cgroup", "0::/a.slice/job\n");
    write_text("sys/fs/cgroup/a.slice/job/memory.max", "max\n");
    write_text("sys/fs/cgroup/a.slice/job/memory.current", "1000000\n");
    assert_true(host_memory_left(folder) == 4000 * 1024);
    /* the parent group has a limit */
    write_text("sys/fs/cgroup/a.slice/memory.max", "3000000\n");
    write_text("sys/fs/cgroup/a.slice/memory.current", "2000000\n");
    write_text("sys/fs/cgroup/a.slice/memory.stat",
               "anon 5\nfile 900\nactive_file 300\ninactive_file 200\n");
    assert_true(host_memory_left(folder) == 1000500);
    write_text("sys/fs/cgroup/a.slice/job/memory.max", "1500000\n");
    assert_true(host_memory_left(folder) == 500000);
    write_text("proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/\n"); /* version 1 */
    write_text("sys/fs/cgroup/memory/memory.limit_in_bytes", "800000\n");
    write_text("sys/fs/cgroup/memory/memory.usage_in_bytes", "700000\n");
    write_text("sys/fs/cgroup/memory/memory.stat",
               "total_active_file 10\ntotal_inactive_file 20\n");
    assert_true(host_memory_left(folder) == 100030);
    char *command = xasprintf("rm -r %s", folder);
    assert_int_equal(system(command), 0);
    free(command);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    update_bucket = 4 * PARAM_ALIGN; /* most parameters take several buckets */
    return finish_ranks(run_all_tests(NULL, NULL));
}
