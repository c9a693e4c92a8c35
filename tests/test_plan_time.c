/* The time that a dry run predicts, compared with measured steps and with the formula of the
 * bubble; and the printed text. */
#include <math.h>
#include <string.h>

#include "model/config/config_load.h"
#include "model/keys/types.h"
#include "tests/test.h"
#include "tests/kit.h"

#include "model/checkpoint/load.h"
#include "model/config/config_load.h"
#include "model/predict/mesh_search.h"
#include "model/predict/memory.h"
#include "model/predict/plan_time.h"
#include "tests/launch.h"

enum { MOST_ARGUMENTS = 24 };

/* Makes a dry run of a configuration with `arguments`, words separated by blanks. */
static Config *plan(const char *yaml, const char *arguments)
{
    static char text[1024];
    char *argv[MOST_ARGUMENTS] = { "train", (char *)yaml, "--dry_run" }, *rest = text;
    int argc = 3;
    snprintf(text, sizeof text, "%s", arguments);
    for (char *word; (word = strtok_r(rest, " ", &rest)) && argc < MOST_ARGUMENTS - 1;)
        argv[argc++] = word;
    return config_load(argc, argv, 1, checkpoint_latest);
}

/* ---- steps that were measured ---------------------------------------------------------------- */

#define LLAMA_2 "configs/Llama-2-7B.yaml"
#define LLAMA_3 "configs/Llama-3-8B.yaml"
#define T2048 "--model.max_sequence_length=2048 --device_memory=79.2 "
#define ON_24GB "--model.max_sequence_length=2048 --device_memory=24 "
#define LONG "--device_memory=79.2 --device_train_microbatch_size=1 --recipe=coat-lean "
#define ONE(b) "--ranks=1 --global_train_batch_size=64 --device_train_microbatch_size=" b " "
#define TWO(n, b) "--ranks=2 --global_train_batch_size=" n " --device_train_microbatch_size=" b " "
#define TENSOR \
    "--ranks=2 --device_memory=78 --recipe=coat --global_train_batch_size=16 " \
    "--device_train_microbatch_size="
#define SHAPE_13B \
    "--model.d_model=5120 --model.n_layers=40 --model.n_heads=40 --model.mlp_hidden_size=27648 "
#define WIDTHS_70B \
    "--model.d_model=8192 --model.n_heads=64 --model.n_kv_heads=8 --model.mlp_hidden_size=57344 "
#define SHAPE_70B WIDTHS_70B "--model.n_layers=80 "
#define EIGHT_BLOCKS_70B \
    WIDTHS_70B "--model.n_layers=8 --model.max_sequence_length=4096 --model.vocab_size=50304 " \
               "--model.embedding_size=50304 "

/* Tokens/s of each H100, in the last six rows of each H200:
 * tests/history/2026-11-28-predicted-times.md. */
static const struct {
    const char *yaml, *arguments;
    double measured;
} rows[] = {
    { LLAMA_2, T2048 ONE("8") "--recipe=coat", 25767 },
    { LLAMA_2, T2048 ONE("8") "--recipe=coat-lean", 25504 },
    { LLAMA_2, T2048 ONE("4") "--recipe=coat", 25292 },
    { LLAMA_2, T2048 ONE("8") "--recipe=coat-lean --lora.rank=16 --lora.base=e4m3", 29897 },
    { LLAMA_2, T2048 ONE("8") "--recipe=coat-lean --offload.optimizer=all", 23742 },
    { LLAMA_2, T2048 SHAPE_13B ONE("8") "--recipe=coat-lean --offload.optimizer=all", 12584 },
    { LLAMA_2, T2048 SHAPE_13B ONE("4") "--recipe=coat-lean --offload.optimizer=all", 12288 },
    { LLAMA_2, T2048 SHAPE_13B ONE("4") "--recipe=coat-lean", 10785 },
    { LLAMA_2, ON_24GB ONE("8") "--recipe=coat-lean --activations.keep=block", 17464 },
    { LLAMA_2, ON_24GB ONE("4") "--recipe=coat-lean --activations.recompute=two_in_three", 17177 },
    { LLAMA_2,
      ON_24GB SHAPE_70B
      "--ranks=1 --global_train_batch_size=8 --device_train_microbatch_size=4 --recipe=coat-lean "
      "--activations.keep=block --lora.rank=16 --lora.base=nf4",
      2575 },
    { LLAMA_3,
      "--ranks=1 --device_memory=79.2 --recipe=coat --model.max_sequence_length=8192 "
      "--global_train_batch_size=16 "
      "--device_train_microbatch_size=2",
      18793 },
    { LLAMA_3,
      LONG "--ranks=1 --model.max_sequence_length=32768 --global_train_batch_size=4 "
           "--activations.keep=inputs",
      10264 },
    { LLAMA_3,
      LONG "--ranks=1 --model.max_sequence_length=131072 --global_train_batch_size=1 "
           "--activations.keep=attention "
           "--tiled_mlp_tokens=131072",
      3927 },
    { LLAMA_3,
      LONG "--ranks=1 --model.max_sequence_length=131072 --global_train_batch_size=1 "
           "--activations.keep=attention "
           "--tiled_mlp_tokens=16384",
      3884 },
    { LLAMA_3,
      LONG "--ranks=1 --model.max_sequence_length=131072 --global_train_batch_size=1 "
           "--activations.keep=block "
           "--tiled_mlp_tokens=131072",
      3167 },
    { "configs/OLMo-1B.yaml",
      "--ranks=1 --device_memory=79.2 --global_train_batch_size=16 "
      "--device_train_microbatch_size=8",
      117000 },
    { LLAMA_2, T2048 TWO("128", "8") "--recipe=coat --fsdp.grad_sync_mode=micro_batch", 24420 },
    { LLAMA_2, T2048 TWO("128", "8") "--recipe=coat", 25640 },
    { LLAMA_2, T2048 TWO("64", "4") "--recipe=coat --parallelism.pipeline=2", 23353 },
    { LLAMA_3,
      LONG "--ranks=2 --model.max_sequence_length=131072 --global_train_batch_size=1 "
           "--activations.keep=attention "
           "--parallelism.context=2",
      3770 },
    { LLAMA_3, TENSOR "2 --model.max_sequence_length=8192", 18265 },
    { LLAMA_3, TENSOR "4 --model.max_sequence_length=8192 --parallelism.tensor=2", 16523 },
    { LLAMA_3, TENSOR "4 --model.max_sequence_length=8192 --parallelism.context=2", 16981 },
    { LLAMA_2, TENSOR "2 " EIGHT_BLOCKS_70B, 24141 },
    { LLAMA_2, TENSOR "4 " EIGHT_BLOCKS_70B "--parallelism.tensor=2", 22392 },
    { LLAMA_2, TENSOR "8 " EIGHT_BLOCKS_70B "--parallelism.tensor=2", 22297 },
};

TEST(test_measured)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Config *c = plan(rows[i].yaml, rows[i].arguments);
        const StepTime t = plan_time(c);
        const double error = plan_time_speed(c, &t) / rows[i].measured - 1;
        if (!(fabs(error) < 0.06))
            fail_msg("%s %s: %.0f tokens/s are predicted, %.0f were measured (%+.1f %%)",
                     rows[i].yaml, rows[i].arguments, plan_time_speed(c, &t), rows[i].measured,
                     100 * error);
        double parts = 0;
        for (TimeUse u = 0; u < NUM_USES; u++)
            parts += t.exposed[u];
        if (!(parts < t.seconds * 1.001 && parts > t.seconds * 0.95))
            fail_msg("%s %s: parts of %.3f s, of a step of %.3f s", rows[i].yaml, rows[i].arguments,
                     parts, t.seconds);
        config_free(c);
    }
}

/* ---- steps that others published -------------------------------------------------------------- */

#define NETWORK "--device_memory=4000 --internode_gb_per_s=50 "
#define MPT_13B \
    NETWORK "--recipe=bf16 --format.grads=bf16 --model.max_sequence_length=2048 " \
            "--activations.keep=block " SHAPE_13B
#define TORCHTITAN \
    NETWORK "--format.grads=f32 --model.max_sequence_length=8192 --activations.keep=inputs "

/* How much slower each GPU is in a larger run, by tokens/s of other programs on hosts of 8 H100s or
 * H200s: tests/history/2026-11-30-published-steps.md. */
static const struct {
    const char *yaml, *arguments;
    int each; /* sequences of a GPU */
    int few, more;
    double measured[2];
} published[] = {
    { LLAMA_3, TORCHTITAN "--recipe=bf16", 2, 8, 128, { 6667, 6514 } },
    { LLAMA_3, TORCHTITAN "--recipe=fp8", 2, 8, 128, { 8532, 8380 } },
    { LLAMA_3, TORCHTITAN "--recipe=fp8", 2, 32, 64, { 10938, 10753 } },
    { LLAMA_2, MPT_13B, 16, 128, 256, { 5080, 4989 } },
    { LLAMA_2, MPT_13B, 16, 128, 512, { 5080, 4952 } },
};

static double speed_of_ranks(size_t row, int ranks)
{
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "%s --ranks=%d --global_train_batch_size=%d --device_train_microbatch_size=%d",
             published[row].arguments, ranks, ranks * published[row].each, published[row].each);
    Config *c = plan(published[row].yaml, arguments);
    const StepTime t = plan_time(c);
    const double speed = plan_time_speed(c, &t);
    config_free(c);
    return speed;
}

/* Other programs compute at other speeds, so only ratios are compared. */
TEST(test_published)
{
    for (size_t i = 0; i < sizeof published / sizeof published[0]; i++) {
        const double predicted =
                         speed_of_ranks(i, published[i].more) / speed_of_ranks(i, published[i].few),
                     measured = published[i].measured[1] / published[i].measured[0];
        if (!(fabs(predicted - measured) < 0.015))
            fail_msg("%s %s, %d to %d GPUs: %.2f %% of the speed are predicted, %.2f were measured",
                     published[i].yaml, published[i].arguments, published[i].few, published[i].more,
                     100 * predicted, 100 * measured);
    }
}

/* ---- formulas -------------------------------------------------------------------------------- */

static double seconds_of(const char *format, int value)
{
    char arguments[512];
    snprintf(arguments, sizeof arguments, format, value);
    Config *c = plan(LLAMA_2, arguments);
    const StepTime t = plan_time(c);
    config_free(c);
    return t.seconds;
}

/* m micro-batches and p stages of equal work take m + p - 1 passes. The model has no large head.
 * The update, which each step has once, is a part of the allowed difference. */
TEST(test_bubble)
{
    static const char settings[] =
        "--ranks=4 --parallelism.pipeline=4 --recipe=coat --model.max_sequence_length=2048 "
        "--device_memory=79 --device_train_microbatch_size=4 --model.vocab_size=1024 "
        "--model.embedding_size=1024 --global_train_batch_size=%d";
    const double few = seconds_of(settings, 4 * 8), many = seconds_of(settings, 4 * 32);
    const double expected = (32.0 + 4 - 1) / (8 + 4 - 1);
    if (!(fabs(many / few / expected - 1) < 0.02))
        fail_msg("32 micro-batches take %.3f times as long as 8, expected %.3f", many / few,
                 expected);
}

/* The time of many micro-batches follows from two short steps, and equals the time in a rehearsal
 * of all micro-batches. */
TEST(test_many)
{
    static const char *const settings[] = {
        "--ranks=2 --parallelism.pipeline=2 --global_train_batch_size=26 "
        "--device_train_microbatch_size=1 --device_memory=79",
        ("--ranks=2 --parallelism.pipeline=2 --global_train_batch_size=28 "
         "--device_train_microbatch_size=1 --device_memory=79 "
         "--parallelism.pipeline_virtual_stages=2 --parallelism.pipeline_schedule=Interleaved1F1B"),
        "--ranks=2 --global_train_batch_size=38 --device_train_microbatch_size=1 "
        "--device_memory=40",
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        Config *c = plan(LLAMA_2, settings[i]);
        const int stages = pipeline_stages(&c->strategy), n = rehearsal_micro_batches(c);
        const Topology topology = { memory_mesh(c), 0, 8, 0 };
        Rehearsal r[2];
        for (int stage = 0; stage < stages; stage++)
            rehearse(&r[stage], &n, 1, c, stage);
        const double all = timeline_step(r, stages, &topology, &c->model).seconds,
                     short_steps = plan_time(c).seconds;
        if (!(fabs(short_steps / all - 1) < 1e-3))
            fail_msg("%s: %.6f s, all %d micro-batches take %.6f", settings[i], short_steps, n,
                     all);
        for (int stage = 0; stage < stages; stage++)
            rehearsal_free(&r[stage]);
        config_free(c);
    }
}

/* The stage that computes longest. Of 31 blocks, the second of two stages has one more than the
 * first, and the head. If the first ten of 32 blocks are trained, only the first stage computes
 * gradients of weights. */
TEST(test_longest_stage)
{
    static const struct {
        const char *settings;
        int stage;
    } rows[] = {
        { "--model.n_layers=31", 1 },
        { "--trainable=[model.layers.?.*]", 0 },
    };
    for (int i = 0; i < 2; i++) {
        char settings[512];
        snprintf(
            settings, sizeof settings,
            "%s --ranks=2 --parallelism.pipeline=2 --recipe=bf16 --model.max_sequence_length=2048 "
            "--device_memory=139 --device_train_microbatch_size=1 --global_train_batch_size=6",
            rows[i].settings);
        Config *c = plan(LLAMA_2, settings);
        assert_int_equal(plan_time(c).stage, rows[i].stage);
        config_free(c);
    }
}

/* If the network is so slow that nothing else matters, a step takes the time of its bytes: each of
 * two hosts with one GPU sends half of the BF16 weights once in forward, and half of the BF16
 * gradients in backward. */
TEST(test_network)
{
    static const char settings[] =
        "--ranks=2 --gpus_per_host=1 --internode_gb_per_s=0.0%d --recipe=bf16 --device_memory=139 "
        "--model.max_sequence_length=2048 --device_train_microbatch_size=1 "
        "--global_train_batch_size=2 "
        "--fsdp.sharding_strategy=SHARD_GRAD_OP";
    const double half = 6.74e9 / 2 * 2, expected = 2 * half / 0.01e9,
                 slow = seconds_of(settings, 1);
    if (!(fabs(slow / expected - 1) < 0.02))
        fail_msg("%.0f s, expected %.0f", slow, expected);
}

/* ---- meshes ---------------------------------------------------------------------------------- */

/* Whether a dry run of ./train accepts the mesh. */
static bool is_accepted(const char *settings, int stages, int context, int tensor, int replicas)
{
    return finish(start_command("%s/train configs/tiny.yaml --dry_run %s --parallelism.pipeline=%d "
                                "--parallelism.context=%d "
                                "--parallelism.tensor=%d --fsdp.sharding_strategy=HYBRID_SHARD "
                                "--fsdp.hybrid_sharding_num_model_replicas=%d",
                                setting("BUILD", "build/cpu"), settings, stages, context, tensor,
                                replicas)) == 0;
}

static void check_possible(const char *settings, int stages, int context, int tensor, int replicas)
{
    Config *c = plan("configs/tiny.yaml", settings);
    c->strategy.pipeline_stages = stages;
    c->strategy.context_ranks = context;
    c->strategy.tensor_ranks = tensor;
    c->strategy.shard_ranks = 8 / stages / tensor / replicas;
    const bool possible = c->strategy.shard_ranks > 0 && mesh_is_possible(c);
    if (possible != is_accepted(settings, stages, context, tensor, replicas))
        fail_msg("%d stages, %d context ranks, %d tensor ranks, %d replicas: possible %d: %s",
                 stages, context, tensor, replicas, possible, output);
    config_free(c);
}

/* The meshes of 8 ranks that a dry run accepts, for a model of 4 blocks with 2 key heads; also with
 * tensor ranks whose slices have no whole groups, and with an optimizer that needs whole
 * matrices. */
TEST(test_possible)
{
    static const char base[] =
        "--ranks=8 --device_memory=8 --model.weight_tying=false --global_train_batch_size=16 "
        "--device_train_microbatch_size=1 --model.max_sequence_length=128";
    for (int stages = 1; stages <= 8; stages *= 2)
        for (int context = 1; context <= 4; context *= 2)
            for (int replicas = 1; replicas <= 4; replicas *= 4)
                check_possible(base, stages, context, 1, replicas);
    for (int tensor = 2; tensor <= 4; tensor *= 2)
        for (int context = 1; context <= 2; context *= 2)
            check_possible(base, 2, context, tensor, 1);
    check_possible(
        "--ranks=8 --device_memory=8 --global_train_batch_size=16 --device_train_microbatch_size=1 "
        "--optimizer.name=muon",
        1, 1, 2, 1);
}

/* ---- words ----------------------------------------------------------------------------------- */

static void expect_limit(const char *arguments, const char *part)
{
    Config *c = plan(LLAMA_3, arguments);
    const StepTime t = plan_time(c);
    char *advice = plan_time_advice(c, &t);
    if (!strstr(advice, part))
        fail_msg("%s: \"%s\"; expected \"%s\"", arguments, advice, part);
    free(advice);
    config_free(c);
}

TEST(test_limits)
{
    expect_limit("--ranks=1 --device_memory=139 --global_train_batch_size=16 "
                 "--device_train_microbatch_size=1",
                 "computation takes");
    expect_limit(
        "--ranks=64 --internode_gb_per_s=1 --device_memory=80 --global_train_batch_size=64 "
        "--device_train_microbatch_size=1",
        "sums of gradients");
    expect_limit("--ranks=8 --device_memory=80 --parallelism.tensor=8 --global_train_batch_size=8 "
                 "--device_train_microbatch_size=8",
                 "mostly for exchanges of tensor ranks: a smaller parallelism.tensor");
    expect_limit("--ranks=8 --gpus_per_host=4 --internode_gb_per_s=45 --device_memory=80 "
                 "--parallelism.context=8 --global_train_batch_size=8 "
                 "--device_train_microbatch_size=8",
                 "context ranks between hosts");
    expect_limit(
        "--ranks=8 --device_memory=80 --parallelism.pipeline=8 --global_train_batch_size=4 "
        "--device_train_microbatch_size=1",
        "stages wait for each other");
    expect_limit("--ranks=1 --device_memory=24 --recipe=coat-lean --activations.keep=block "
                 "--global_train_batch_size=1 "
                 "--device_train_microbatch_size=1",
                 "copies from and to the host");
}

static void expect_printed(const char *arguments, const char *part)
{
    expect_status(
        finish(start_command("%s/train configs/Llama-3-8B.yaml --dry_run --device_memory=80 %s",
                             setting("BUILD", "build/cpu"), arguments)),
        0);
    if (!strstr(output, part))
        fail_msg("%s: no \"%s\" in\n%s", arguments, part, output);
}

TEST(test_printed)
{
    expect_printed("--ranks=1024 --internode_gb_per_s=45 --global_train_batch_size=1024 "
                   "--device_train_microbatch_size=1",
                   "not measured beyond 2 GPUs");
    expect_printed("--ranks=16 --global_train_batch_size=16 --device_train_microbatch_size=1",
                   "give --internode_gb_per_s");
    expect_printed(
        "--ranks=2 --global_train_batch_size=4 --device_train_microbatch_size=1 --mesh=auto",
        "1 replicas x 2 shards x 1 context ranks x 1 tensor ranks x 1 stages: ");
    /* One sequence for two ranks: they are context ranks, tensor ranks, or stages. */
    expect_printed("--ranks=2 --global_train_batch_size=1 --device_train_microbatch_size=1 "
                   "--parallelism.context=2 --mesh=auto",
                   "meshes of 2 ranks: 3 fit");
    assert_non_null(strstr(output, "FULL_SHARD --parallelism.context=2\n"));
    assert_non_null(strstr(output, "FULL_SHARD --parallelism.context=1 --parallelism.tensor=2\n"));
    assert_non_null(
        strstr(output, "FULL_SHARD --parallelism.context=1 --parallelism.pipeline=2\n"));
    assert_non_null(strstr(output, "limit: "));
}

#define FOUR "--ranks=4 --global_train_batch_size=16 --device_train_microbatch_size=1 "

/* The settings that --mesh=auto prints are accepted together with the given settings, and give the
 * step that it predicts. */
TEST(test_printed_settings)
{
    static const char *const given[] = {
        "",
        "--fsdp.sharding_strategy=SHARD_GRAD_OP",
        "--fsdp.sharding_strategy=NO_SHARD",
        "--parallelism.shard=2",
        "--parallelism.replicate=4 --fsdp.sharding_strategy=SHARD_GRAD_OP",
        "--fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2 --fsdp.hybrid_sharding_num_model_replicas=2",
        "--parallelism.pipeline=2 --parallelism.tensor=2",
        "--parallelism.context=2 --parallelism.replicate=2"
    };
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        char found[3][512], line[1024], predicted[64], *at = output;
        int count = 0;
        snprintf(line, sizeof line, FOUR "%s --mesh=auto", given[i]);
        expect_printed(line, "meshes of 4 ranks");
        while (count < 3 && (at = strstr(at, " stages: ")) != NULL)
            snprintf(found[count++], sizeof *found, "%s", at += strlen(" stages: "));
        assert_int_equal(count, 3);
        for (int k = 0; k < count; k++) {
            char *settings = strstr(found[k], "--");
            settings[strcspn(settings, "\n")] = '\0';
            snprintf(line, sizeof line, FOUR "%s %s", given[i], settings);
            snprintf(predicted, sizeof predicted, "predicted: %.*s a step",
                     (int)strcspn(found[k], ","), found[k]);
            expect_printed(line, predicted);
        }
    }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
