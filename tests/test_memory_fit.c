/* The memory plans of dry runs for other devices, and whether the plans fit. */
#include <sys/resource.h>
#include <time.h>

#include "model/checkpoint/load.h"
#include "model/config/config_load.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "model/predict/memory_fit.h"
#include "model/predict/memory.h"
#include "model/store/param_store_sizes.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/launch.h"

#define MODEL_7B NULL
#define MODEL_13B "--model={d_model: 5120, n_layers: 40, n_heads: 40, mlp_hidden_size: 27648}"

/* Plans Llama-2-7B with sequences of 2048 tokens, 64 per rank and step, all in device memory. */
static Config *plan(int ranks, const char *recipe, const char *memory, const char *more)
{
    char text[4][64];
    snprintf(text[0], sizeof text[0], "--ranks=%d", ranks);
    snprintf(text[1], sizeof text[1], "--recipe=%s", recipe);
    snprintf(text[2], sizeof text[2], "--device_memory=%s", memory);
    snprintf(text[3], sizeof text[3], "--global_train_batch_size=%d", 64 * ranks);
    char *argv[] = { "train",
                     "configs/Llama-2-7B.yaml",
                     "--dry_run",
                     text[0],
                     text[1],
                     text[2],
                     text[3],
                     "--model.max_sequence_length=2048",
                     "--device_train_microbatch_size=8",
                     (char *)more,
                     NULL };
    Config *c = config_load(more ? 10 : 9, argv, 1, checkpoint_latest);
    c->offload.activations = c->offload.frozen = c->offload.optimizer = c->offload.master =
        HOST_NEVER;
    return c;
}

static const char *last_line(void)
{
    size_t n = strlen(output);
    while (n > 0 && output[n - 1] == '\n')
        output[--n] = '\0';
    const char *line = strrchr(output, '\n');
    return line ? line + 1 : output;
}

static int dry_run(int micro_batch, const char *arguments)
{
    return finish(start_command(
        "%s/train configs/Llama-2-7B.yaml --dry_run --device_train_microbatch_size=%d %s",
        setting("BUILD", "build/cpu"), micro_batch, arguments));
}

/* A dry run without mpirun and data takes a second, and a fraction of the 31 GiB that one of 1024
 * ranks needs. This is the first test, because it measures the largest child process. */
TEST(test_many_ranks)
{
    struct rusage use;
    const time_t start = time(NULL);
    expect_status(dry_run(1, "--recipe=bf16 --ranks=1024 --device_memory=80 "
                             "--data.paths='[s3://no/such.npy, no/such.npy]'"),
                  0);
    assert_true(time(NULL) - start < 60);
    assert_int_equal(getrusage(RUSAGE_CHILDREN, &use), 0);
    assert_true(use.ru_maxrss < 1 << 20); /* kB */
    expect_output("total 31.084 of 80.0");
    assert_ptr_equal(strstr(last_line(), "fits: 34.0 of 80.0 GiB on each of 1024 devices"),
                     last_line());
}

/* The largest batches below 80 GB, which are 74.506 GiB: first those that were measured when each
 * buffer had separate memory (tests/history/2026-11-21-recipes.md), then those that fit since
 * buffers share memory and group scales are bytes. 0: not even one sequence fits. */
TEST(test_measured)
{
    static const struct {
        const char *model;
        int ranks;
        const char *recipe;
        int measured, largest;
    } rows[] = {
        { MODEL_7B, 1, "bf16", 0, 0 },        { MODEL_7B, 1, "coat", 7, 8 },
        { MODEL_7B, 1, "coat-lean", 9, 10 },  { MODEL_7B, 2, "bf16", 3, 3 },
        { MODEL_7B, 2, "coat", 11, 12 },      { MODEL_7B, 2, "coat-lean", 14, 15 },
        { MODEL_7B, 4, "bf16", 5, 5 },        { MODEL_7B, 4, "coat", 13, 14 },
        { MODEL_7B, 4, "coat-lean", 16, 18 }, { MODEL_13B, 1, "coat-lean", 0, 0 },
        { MODEL_13B, 2, "bf16", 0, 0 },       { MODEL_13B, 2, "coat", 4, 4 },
        { MODEL_13B, 2, "coat-lean", 5, 6 },  { MODEL_13B, 4, "bf16", 2, 2 },
        { MODEL_13B, 4, "coat", 7, 7 },       { MODEL_13B, 4, "coat-lean", 9, 10 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Config *c = plan(rows[i].ranks, rows[i].recipe, "74.506", rows[i].model);
        const int found = memory_fit_largest(c);
        if (found != rows[i].largest || found < rows[i].measured)
            fail_msg("%s, %s on %d: %d sequences, expected %d, measured were %d",
                     rows[i].model ? "13B" : "7B", rows[i].recipe, rows[i].ranks, found,
                     rows[i].largest, rows[i].measured);
        config_free(c);
    }
}

/* The memory in use on an H200 of 139.8 GiB exceeds the plan by at most the allowance, and by no
 * less than the allowance - 1.5 GiB. A plan adds the allowance before it says whether the run
 * fits. */
TEST(test_needed)
{
    static const struct {
        int ranks;
        const char *recipe;
        double used, planned;
    } measured[] = {
        { 1, "coat", 76.2, 74.587 },       { 1, "coat-lean", 69.4, 67.837 },
        { 1, "coat-act", 126.5, 124.888 }, { 1, "coat-opt", 106.0, 104.403 },
        { 4, "coat", 61.8, 58.909 },
    };
    for (size_t i = 0; i < sizeof measured / sizeof measured[0]; i++) {
        Config *c = plan(measured[i].ranks, measured[i].recipe, "139.8", NULL);
        c->strategy.gathering = GATHER_OFTEN;
        Model m;
        ParamStore store;
        memory_plan(&m, &store, c);
        const double planned = (double)model_planned_bytes(&m, &store) / (1 << 30),
                     allowed = memory_fit_needed(c) / (1 << 30) - planned;
        const double used = measured[i].used - measured[i].planned;
        if (!(allowed >= used - 0.05 && allowed < used + 1.5))
            fail_msg("%s on %d: %.2f GiB allowed for, %.2f were used", measured[i].recipe,
                     measured[i].ranks, allowed, used);
        assert_true(planned <= measured[i].planned);
        model_free(&m, &store);
        config_free(c);
    }
}

/* If whole gradients leave 3 GiB of the planned device free, they are summed once per step. This
 * machine's memory does not count. */
TEST(test_mode)
{
    static const struct {
        const char *memory;
        bool once;
    } rows[] = { { "139.8", true }, { "59.3", true }, { "59.2", false } };
    for (int i = 0; i < 3; i++) {
        Model m;
        ParamStore store;
        /* 56.2 GiB with whole gradients, 44.7 GiB without */
        Config *c = plan(4, "coat", rows[i].memory, NULL);
        c->strategy.gathering = GATHER_OFTEN;
        memory_plan(&m, &store, c);
        assert_int_equal(store.sum_once, rows[i].once);
        assert_true(fabs((double)model_planned_bytes(&m, &store) / (1 << 30) -
                         (rows[i].once ? 56.231 : 44.678)) < 0.001);
        model_free(&m, &store);
        config_free(c);
    }
}

/* Weights stay gathered for as many units as leave 3 GiB of the device free. The plan prints this
 * number. */
TEST(test_kept)
{
    static const struct {
        const char *memory;
        int resident;
        const char *line;
    } rows[] = {
        { "139.8", 34, "weights gathered once per step,\n  gradients summed once per step\n" },
        { "50", 6, "weights gathered once per step in 6 of 34 units (else for each pass)" },
        { "47.6", 0, "weights gathered for each pass," },
    };
    const double spare = 3.0 * (1 << 30);
    for (int i = 0; i < 3; i++) {
        Model m, more;
        ParamStore store, other;
        char arguments[128];
        Config *c = plan(4, "coat", rows[i].memory, NULL);
        memory_plan(&m, &store, c);
        model_plan(&more, &other, c,
                   (ShardChoice){ store.shards, store.rank, store.sum_once, store.resident + 1 });
        assert_int_equal(store.resident, rows[i].resident);
        if (store.resident > 0)
            assert_true((double)model_planned_bytes(&m, &store) <= memory_of_device(c) - spare);
        if (store.resident < store.num_units)
            assert_true((double)model_planned_bytes(&more, &other) > memory_of_device(c) - spare);
        model_free(&m, &store);
        model_free(&more, &other);
        snprintf(arguments, sizeof arguments,
                 "--model.max_sequence_length=2048 --recipe=coat --ranks=4 "
                 "--device_memory=%s --global_train_batch_size=256",
                 rows[i].memory);
        expect_status(dry_run(8, arguments), 0);
        expect_output(rows[i].line);
        config_free(c);
    }
}

/* On 8 GiB, whole gradients do not fit; sharded gradients do. */
TEST(test_small_device)
{
    char *argv[] = { "train",
                     "configs/OLMo-1B.yaml",
                     "--dry_run",
                     "--ranks=8",
                     "--device_memory=8",
                     "--recipe=coat-lean",
                     "--global_train_batch_size=64",
                     "--device_train_microbatch_size=2",
                     NULL };
    Config *c = config_load(8, argv, 1, checkpoint_latest);
    assert_true(memory_fit_needed(c) <= memory_of_device(c));
    assert_int_equal(memory_fit_largest(c), 3);
    config_free(c);
}

/* With stages, a step keeps its number of micro-batches, because micro-batches in flight take
 * memory. */
TEST(test_stages)
{
    enum { MICRO_BATCHES = 4, MOST = 16 };
    char *argv[] = { "train",
                     "configs/OLMo-1B.yaml",
                     "--dry_run",
                     "--ranks=4",
                     "--device_memory=24",
                     "--recipe=bf16",
                     "--parallelism.pipeline=4",
                     "--model.weight_tying=false",
                     "--global_train_batch_size=16",
                     "--device_train_microbatch_size=4",
                     "--host={activations: never, moments: never, master: never}",
                     NULL };
    Config *c = config_load(11, argv, 1, checkpoint_latest), other = *c;
    int fits = 0;
    for (int n = 1; n <= MOST; n++) {
        other.device_train_microbatch_size = n;
        other.global_train_batch_size = MICRO_BATCHES * n;
        fits += memory_fit_needed(&other) <= memory_of_device(c);
    }
    assert_in_range(fits, MICRO_BATCHES + 1, MOST - 1);
    assert_int_equal(memory_fit_largest(c), fits);
    config_free(c);
}

/* A step of 512 micro-batches sums gradients in F32, a step of 128 in BF16. The largest micro-batch
 * that fits does not depend on the configured one. */
TEST(test_format_of_gradients)
{
    for (int n = 1; n <= 4; n *= 4) {
        char text[64];
        snprintf(text, sizeof text, "--device_train_microbatch_size=%d", n);
        char *argv[] = { "train",
                         "configs/Llama-3-8B.yaml",
                         "--dry_run",
                         "--ranks=1",
                         "--device_memory=79",
                         "--model.max_sequence_length=4096",
                         text,
                         NULL };
        Config *c = config_load(7, argv, 1, checkpoint_latest);
        assert_int_equal(c->recipe.grads.dtype, n == 1 ? F32 : BF16);
        assert_int_equal(memory_fit_largest(c), 4);
        config_free(c);
    }
}

TEST(test_does_not_fit)
{
    expect_status(dry_run(1, "--recipe=bf16 --ranks=1 --device_memory=80 --data=null"), 0);
    expect_output("on the host, GiB: activations of ");
    expect_output("sequences of 4096 tokens with CPU offload; ");
    assert_ptr_equal(strstr(last_line(), "fits: "), last_line());
    expect_status(
        dry_run(1,
                "--recipe=bf16 --ranks=1 --device_memory=80 --data=null --offload.optimizer=never"),
        0);
    expect_output("largest micro-batch that fits: none");
    assert_ptr_equal(strstr(last_line(), "DOES NOT FIT: "), last_line());
}

/* All ranks of a dry run under mpirun search for more ranks, in which they agree on the memory. */
TEST(test_does_not_fit_on_two_ranks)
{
    if (!can_run(2, "a dry run that does not fit"))
        return;
    expect_status(
        finish(start_command("%s -n 2 %s/train configs/Llama-2-7B.yaml --dry_run --recipe=bf16 "
                             "--device_memory=20 --data=null --offload='{activations: never, "
                             "frozen: never, optimizer: never, master: never}'",
                             setting("LAUNCH", "mpirun"), setting("BUILD", "build/cpu"))),
        0);
    expect_output("largest micro-batch that fits: none");
    assert_ptr_equal(strstr(last_line(), "DOES NOT FIT: "), last_line());
}

/* Llama-3.1-405B: 126 blocks of 3,187,703,808 numbers, more than an int can count. Each of 64 ranks
 * has a 64th of the 405,853,388,800 weights in BF16, plus padding. Two gathered blocks have
 * 3,187,671,040 FP8 codes each, of W and of W^T. Embedding and head use one BF16 buffer, one after
 * the other. Each rank has the norms of all blocks. */
TEST(test_large_units)
{
    char *argv[] = { "train",
                     "configs/Llama-3-8B.yaml",
                     "--dry_run",
                     "--ranks=64",
                     "--device_memory=80",
                     "--recipe=coat-lean",
                     "--activations.keep=block",
                     "--model.d_model=16384",
                     "--model.n_layers=126",
                     "--model.n_heads=128",
                     "--model.mlp_hidden_size=106496",
                     "--parallelism.context=8",
                     "--device_train_microbatch_size=1",
                     "--global_train_batch_size=8",
                     NULL };
    const double numbers = 405853388800, padding = 128 * 6 * PARAM_ALIGN * 64;
    const size_t block = 3187671040,
                 gathered = 4 * block + 2 * 128256UL * 16384 + 2 * 252UL * 16384;
    Config *c = config_load(14, argv, 1, checkpoint_latest);
    Model m;
    ParamStore store;
    memory_plan(&m, &store, c);
    double master = 0, most = 0;
    for (int u = 0; u < store.num_units; u++) {
        master += (double)tensor_bytes(store.shard[u].slice[TRAINED].stored);
        most = fmax(most, (double)tensor_numel(store.plan[u].weights->elements));
    }
    assert_in_range(master, (unsigned long)(numbers * 2 / 64),
                    (unsigned long)((numbers + padding) * 2 / 64));
    assert_in_range(most, block, block + 6 * PARAM_ALIGN * 64);
    assert_in_range(store_weight_bytes(&store), gathered, gathered + (1 << 20));
    model_free(&m, &store);
    config_free(c);
}

/* int counts the elements of a matrix, but not the elements of a unit. */
TEST(test_large_matrices)
{
    static const char model[] = "--recipe=bf16 --ranks=8 --device_memory=80 --data=null "
                                "--model.d_model=16384 --model.n_layers=2 "
                                "--model.n_heads=128 --model.n_kv_heads=8";
    char arguments[512];
    snprintf(arguments, sizeof arguments,
             "%s --model.mlp_hidden_size=49152 --lora.rank=8192 "
             "--lora.target_modules=[o_proj,gate_proj,up_proj,down_proj]",
             model);
    expect_status(dry_run(1, arguments), 0);
    snprintf(arguments, sizeof arguments, "%s --model.mlp_hidden_size=131072", model);
    expect_status(dry_run(1, arguments), STATUS_INPUT);
    expect_output("error: block 0: gate_up has 131072 x 16384 numbers; a matrix can have at most "
                  "2147483391. Use a smaller");
}

/* The error names the missing amount of memory, before anything is allocated. */
TEST(test_host_memory)
{
    Config *c = plan(1, "coat", "80", NULL);
    Model m;
    ParamStore store;
    c->offload.activations = HOST_ALL;
    memory_plan(&m, &store, c);
    m.offload.host_bytes = (size_t)1 << 50;
    DIES("GiB and writing a checkpoint 25.49 GiB. That is 10", memory_check_host(&m, &store, c));
    m.text.forward_only = true; /* an evaluation writes no checkpoint */
    DIES("GiB and writing a checkpoint 0.00 GiB", memory_check_host(&m, &store, c));
    model_free(&m, &store);
    config_free(c);
}

/* The CPU back end knows the memory of its own ranks, which is this host's memory, but not the
 * memory of a GPU in another host. */
TEST(test_unknown_memory)
{
    if (on_gpu())
        skip();
    expect_status(dry_run(1, "--recipe=bf16 --ranks=64"), STATUS_INPUT);
    expect_output(
        "To plan for 64 ranks (1 started), give the memory of a GPU in GiB: --device_memory=80");
    assert_null(strstr(output, "fits"));
    expect_status(train(1, "--dry_run"), 0);
    assert_ptr_equal(strstr(last_line(), "fits: "), last_line());
    expect_status(train(2, "--dry_run --ranks=2"), 0);
    expect_output("on each of 2 devices");
}

/* Runs the command that begins at line[5] and may continue in the next lines. A search for meshes
 * is left out, because it takes seconds. */
static void run_as_written(const char *line, FILE *f)
{
    char command[2048], *end;
    snprintf(command, sizeof command, "%s", line + 5);
    while ((end = strchr(command, '\\'))) {
        const size_t room = sizeof command - (size_t)(end - command);
        assert_non_null(fgets(end, (int)room, f));
    }
    command[strcspn(command, "#\n")] = '\0';
    expect_status(
        finish(start_command("%s%s --mesh=given", setting("BUILD", "build/cpu"), command)), 0);
    assert_ptr_equal(strstr(last_line(), "fits: "), last_line());
}

/* Every dry run in the documents that has further options is a command on lines of its own. It must
 * plan a run that fits. */
TEST(test_documents)
{
    static const char *const documents[] = { "README.md",           "configs/README.md",
                                             "configs/PRETRAIN.md", "configs/FINE-TUNE.md",
                                             "data/README.md",      "scripts/README.md" };
    int commands = 0;
    for (size_t i = 0; i < sizeof documents / sizeof documents[0]; i++) {
        FILE *f = fopen(documents[i], "r");
        char line[2048];
        assert_non_null(f);
        while (fgets(line, sizeof line, f)) {
            if (!strstr(line, "--dry_run --"))
                continue;
            if (strncmp(line, "    ./train ", 12) != 0)
                fail_msg("%s: no command that can be run: %s", documents[i], line);
            run_as_written(line, f);
            commands++;
        }
        fclose(f);
    }
    assert_int_equal(commands, 4);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
