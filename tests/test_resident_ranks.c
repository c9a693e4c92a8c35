/* Weights that stay gathered or, on one rank, stay rounded. The same number of units stays on every
 * rank, as many as fit. This changes no bit, and the trace shows how often weights are gathered or
 * rounded. On 1, 2 and 4 ranks. */
#include "kernels/runtime/trace.h"
#include "model/plan_model.h"
#include "model/predict/memory.h"
#include "model/predict/memory_fit.h"
#include "tests/test.h"
#include "tests/ranks_case.h"

/* with two kept units, block 1 stays, and blocks 3 and 5 share a buffer */
enum { LAYERS = 5, MICRO_BATCHES = 3 };

/* once: how often a step gathers a block that stays; lowest: the lowest block of a shared buffer.
 * On one rank: how often a step makes the operands of the lowest block and of another block. */
enum { SOME_MODULES = 1 << LORA_Q | 1 << LORA_V | 1 << LORA_UP | 1 << LORA_DOWN };
static const struct {
    Case k;
    int once, lowest, lowest_on_one, on_one;
} rows[] = {
    { { "bf16", OLMO2 }, 0, 1 + MICRO_BATCHES },
    { { "coat", OLMO }, 1, 1 + MICRO_BATCHES, 2 * MICRO_BATCHES, 2 * MICRO_BATCHES },
    { { "coat-lean", LLAMA, ALL_MODULES, BASE_E4M3 },
      0,
      1 + MICRO_BATCHES,
      1 + MICRO_BATCHES,
      2 * MICRO_BATCHES },
    { { "coat", OLMO3, SOME_MODULES, BASE_NF4 },
      1,
      2 * MICRO_BATCHES,
      2 * MICRO_BATCHES,
      2 * MICRO_BATCHES },
};
enum { COAT = 1, NUM_ROWS = sizeof rows / sizeof rows[0] };

typedef struct {
    double loss[2], norm[2];
} Curve;

static void open_run(Run *r, int row, Gathering gathering)
{
    configure(r, &rows[row].k, with_sizes(architecture(rows[row].k.model), 64, 16, 80, LAYERS),
              (Strategy){ comm_size(), gathering, SUM_OFTEN });
    r->config.global_train_batch_size = MICRO_BATCHES * comm_size();
}

/* ---- traces ---------------------------------------------------------------------------------- */

static char folder[32], text[1 << 22];

static void begin_trace(void)
{
    strcpy(folder, "/tmp/coat-trace-XXXXXX");
    assert_non_null(mkdtemp(folder));
    trace_open(folder, comm_rank());
}

/* Into `text`. */
static void end_trace(void)
{
    char path[64];
    trace_close();
    snprintf(path, sizeof path, "%s/trace-rank%d.json", folder, comm_rank());
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    const size_t length = fread(text, 1, sizeof text - 1, f);
    assert_true(length < sizeof text - 1);
    text[length] = '\0';
    fclose(f);
    unlink(path);
    rmdir(folder);
}

/* Traces a step: it has spans of all kinds, each operation among them, its file is JSON, and waits
 * are not negative. */
TEST(test_trace)
{
    Run r;
    open_run(&r, COAT, GATHER_OFTEN);
    place_run(&r);
    begin_trace();
    for (int s = 0; s < 2; s++) {
        trace_step(s, s == 1);
        forward_backward(&r, s, 2);
        assert_true(trace_step_end() >= 0);
    }
    end_trace();
    close_run(&r);
    assert_non_null(strstr(text, "\"forward 1\""));
    assert_non_null(strstr(text, "\"backward 3\""));
    assert_non_null(strstr(text, "\"gather 3\""));
    assert_non_null(strstr(text, "\"cat\": \"operation\", \"name\": \"matmul_swiglu\""));
    if (comm_size() > 1)
        assert_non_null(strstr(text, "\"reduce 0\""));
    assert_string_equal(text + strlen(text) - 2, "]\n");
}

/* ---- weights that stay ----------------------------------------------------------------------- */

/* Returns the memory of a device that the weights leave free. */
static const double SPARE = 3.0 * (1 << 30);

/* Returns the memory of a device for `kept` units that stay, but not for one more block. */
static double needed(const Run *r, bool sum_once, int resident)
{
    Model m;
    ParamStore store;
    model_plan(&m, &store, &r->config,
               (ShardChoice){ comm_size(), comm_rank(), sum_once, resident });
    const double bytes = (double)model_planned_bytes(&m, &store);
    model_free(&m, &store);
    return bytes + 1 + SPARE;
}

static void limit(Run *r, int resident)
{
    r->config.device_memory = needed(r, false, resident) / (1 << 30);
}

static int gathers(int unit)
{
    char name[32];
    int count = 0;
    snprintf(name, sizeof name, "\"gather %d\"", unit);
    for (const char *at = text; (at = strstr(at, name)); at++)
        count++;
    return count;
}

/* Runs two steps, the second traced, and evaluates the loss after each. */
static Curve train_kept(Run *r)
{
    Curve c = { 0 };
    begin_trace();
    for (int s = 0; s < 2; s++) {
        trace_step(s, s == 1);
        c.norm[s] = train_step(r, s);
        trace_step_end();
        take_loss(r);
        c.loss[s] = evaluation_loss(r);
    }
    end_trace();
    return c;
}

/* Returns how often a step makes the weights of block 1 + 2k. */
static int expected_gathers(int row, int resident, int k)
{
    if (comm_size() == 1)
        return k < resident ? 0 : k == 0 ? rows[row].lowest_on_one : rows[row].on_one;
    return k < resident ? rows[row].once : k == resident ? rows[row].lowest : 2 * MICRO_BATCHES;
}

/* Kept weights have the bits of weights that are made for each pass. The weights of a buffer's
 * lowest block are still there when the next forward pass begins, except NF4 weights, which are in
 * backward's layout. The evaluation after the previous step has made the kept weights. On several
 * ranks, FP8 weights are transposed in the step; those of a base are transposed only once. */
TEST(test_kept)
{
    /* one rank uses BF16 weights as stored */
    for (int i = comm_size() == 1 ? COAT : 0; i < NUM_ROWS; i++) {
        Curve often;
        for (int resident = 0; resident < 3; resident++) {
            Run r;
            open_run(&r, i,
                     (Gathering[]){ GATHER_OFTEN, GATHER_ONCE_IF_FITS, GATHER_ONCE }[resident]);
            if (resident == 1)
                limit(&r, 2);
            place_run(&r);
            assert_int_equal(r.store.resident, ((int[]){ 0, 2, LAYERS + 2 })[resident]);
            const Curve c = train_kept(&r);
            for (int k = 0; k < 2; k++) {
                const int found = gathers(1 + 2 * k), expected = expected_gathers(i, resident, k);
                if (found != expected)
                    fail_msg("%s, %d units stay: block %d is gathered %d times, expected %d",
                             rows[i].k.recipe, r.store.resident, 1 + 2 * k, found, expected);
            }
            close_run(&r);
            if (resident == 0)
                often = c;
            check_same_bytes("with weights that stay", &c, &often, sizeof c);
        }
    }
}

static size_t total, used; /* memory of a device, if a test sets it */

size_t __real_device_memory_total(void), __wrap_device_memory_total(void);
size_t __wrap_device_memory_total(void)
{
    return total ? total : __real_device_memory_total();
}

size_t __real_device_memory_used(void), __wrap_device_memory_used(void);
size_t __wrap_device_memory_used(void)
{
    return total ? used : __real_device_memory_used();
}

static int planned_to_keep(Run *r, bool *sums_once)
{
    memory_plan(&r->model, &r->store, &r->config);
    const int resident = r->store.resident;
    *sums_once = r->store.sum_once;
    close_run(r);
    return resident;
}

/* If devices have memory for different numbers of units, all ranks keep the smallest number. The
 * same holds if other programs use memory, which changes neither how gradients are summed nor a dry
 * run. */
TEST(test_agreement)
{
    bool once;
    Run r;
    open_run(&r, COAT, GATHER_ONCE_IF_FITS);
    limit(&r, comm_size() - comm_rank());
    assert_int_equal(planned_to_keep(&r, &once), 1);

    r.config.device_memory = 0;
    r.config.strategy.grad_sum = SUM_ONCE_IF_FITS;
    total = (size_t)1000 << 30;
    used = 1;
    assert_int_equal(planned_to_keep(&r, &once), LAYERS + 2);
    assert_int_equal(once, comm_size() > 1);
    used = total - (size_t)needed(&r, true, comm_size() - comm_rank());
    assert_int_equal(planned_to_keep(&r, &once), 1);
    assert_int_equal(once, comm_size() > 1);
    r.config.dry_run = true;
    r.config.ranks = comm_size();
    assert_int_equal(planned_to_keep(&r, &once), LAYERS + 2);
    total = 0;
}

/* Returns the bytes of a plan that gathers weights for each pass. */
static double planned_bytes(const Run *r, HostUse activations)
{
    Config c = r->config;
    Model m;
    ParamStore store;
    c.device_memory = 1000;
    c.offload.activations = activations;
    c.strategy.gathering = GATHER_OFTEN;
    memory_plan(&m, &store, &c);
    const double bytes = (double)model_planned_bytes(&m, &store);
    model_free(&m, &store);
    return bytes;
}

/* Two stages of two shard or tensor ranks, whose devices have memory for different numbers of units
 * that stay, or of slots for activations. Both ranks of a stage have the smaller number, because
 * they gather together and their tensors have the same offsets. */
static void check_stages(int tensor, bool slots)
{
    Run r;
    open_run(&r, 0, GATHER_OFTEN);
    r.config.model.n_layers = 12;
    r.config.strategy = mesh(2, 1, tensor);
    r.config.strategy.grad_sum = SUM_ONCE;
    r.config.strategy.gathering = slots ? GATHER_OFTEN : GATHER_ONCE_IF_FITS;
    divide(r.config.strategy);
    const bool more = comm_rank() % 2 == 1;
    const double least = planned_bytes(&r, slots ? HOST_ALL : HOST_NEVER),
                 most = planned_bytes(&r, HOST_NEVER);
    const double bytes =
        slots ? least + (more ? 0.7 : 0.3) * (most - least) + memory_allowance(&r.config)
              : least + SPARE + (more ? 100000 : 1);
    r.config.offload.activations = slots ? HOST_AUTO : HOST_NEVER;
    r.config.device_memory = bytes / (1 << 30);
    memory_plan(&r.model, &r.store, &r.config);
    const int own = slots ? r.model.offload.slots : r.store.resident;
    int all[2];
    comm_gather(all, &own, sizeof own, RANKS_STAGE);
    assert_true(slots ? own > 0 && own < r.model.offload.saves : own < r.store.num_units);
    assert_int_equal(all[0], all[1]);
    close_run(&r);
    divide(mesh(1, 1, 1));
}

TEST(test_stages)
{
    if (comm_size() < 4)
        return;
    check_stages(1, false);
    check_stages(1, true);
    check_stages(2, true);
}

/* A dry run with different devices plans for the smallest device. */
TEST(test_smallest_device)
{
    enum { SEQUENCES = 5, MORE = 3 };
    Run r;
    open_run(&r, COAT, GATHER_OFTEN);
    r.config.dry_run = true;
    r.config.ranks = comm_size();
    r.config.global_train_batch_size = 32 * comm_size();
    r.config.device_memory = 1;
    r.config.device_train_microbatch_size = SEQUENCES + MORE * (comm_size() - 1 - comm_rank());
    r.config.device_memory = memory_fit_needed(&r.config) / (1 << 30);
    assert_int_equal(memory_fit_largest(&r.config), SEQUENCES);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
