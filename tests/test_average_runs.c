/* Runs with `average`: the mean of the snapshots in double, the same training as without it,
 * evaluation, resumes. Also each count that a checkpoint stores next to a state, in runs that keep
 * or drop the state. */
#include "model/checkpoint/safetensors.h"
#include "tests/test.h"
#include "tests/launch.h"

#define SOME_BATCHES "--eval_subset_num_batches=8 " /* of the validation set */
#define USUAL \
    "--save_interval=2 --save_num_checkpoints_to_keep=-1 --eval_interval=4 " \
    "--max_duration=12 " SOME_BATCHES
#define AVERAGE "--average.last=3 --average.every=2 "

static int run(int ranks, const char *name, const char *more)
{
    return train(ranks, USUAL "--save_folder=%s/%s %s", folder, name, more);
}

static SafeFile *open_file(const char *checkpoint, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/%s", folder, checkpoint, name);
    return safetensors_open(path);
}

/* Returns the file of the model, or of its adapters. */
static SafeFile *open_weights(const char *checkpoint)
{
    char config[256];
    snprintf(config, sizeof config, "%s/adapter_config.json", checkpoint);
    return open_file(checkpoint,
                     exists(config) ? "adapter_model.safetensors" : "model.safetensors");
}

/* Returns BF16 or F32 values as floats; the caller frees them. */
static float *values_of(const SafeFile *f, const char *name, size_t *n)
{
    const SafeTensor *t = safetensors_find(f, name);
    assert_non_null(t);
    const bool bf16 = strcmp(t->dtype, "BF16") == 0;
    *n = (t->end - t->begin) / (bf16 ? 2 : 4);
    void *raw = malloc(t->end - t->begin);
    float *x = malloc(*n * sizeof *x);
    safetensors_read(f, raw, t, 0, t->end - t->begin);
    for (size_t i = 0; i < *n; i++) {
        const uint32_t bits =
            bf16 ? (uint32_t)((const uint16_t *)raw)[i] << 16 : ((const uint32_t *)raw)[i];
        memcpy(&x[i], &bits, sizeof bits);
    }
    free(raw);
    return x;
}

/* Compares the average with the mean of `count` checkpoints, up to 3, in double. Each of two F32
 * updates has four roundings of numbers up to 2 max|x|, so 16 units of 2^-24 max|x| bound their
 * sum. A BF16 result is rounded once more, by at most 2^-8. */
static void check_mean_of(const char *average, char from[][64], int count, double rounding)
{
    SafeFile *snapshot[3], *mean = open_weights(average);
    for (int k = 0; k < count; k++)
        snapshot[k] = open_weights(from[k]);
    assert_true(mean->count > 0 && mean->count == snapshot[0]->count);
    for (int t = 0; t < mean->count; t++) {
        size_t n;
        float *x[3], *y = values_of(mean, mean->tensor[t].name, &n);
        for (int k = 0; k < count; k++)
            x[k] = values_of(snapshot[k], mean->tensor[t].name, &n);
        for (size_t i = 0; i < n; i++) {
            double sum = 0, most = 0;
            for (int k = 0; k < count; k++) {
                sum += (double)x[k][i];
                most = fmax(most, fabs((double)x[k][i]));
            }
            if (!(fabs((double)y[i] - sum / count) <=
                  16 * 0x1p-24 * most + rounding * fabs(sum / count)))
                fail_msg("%s: %s, element %zu: %.9g, expected %.9g", average, mean->tensor[t].name,
                         i, (double)y[i], sum / count);
        }
        free(y);
        for (int k = 0; k < count; k++)
            free(x[k]);
    }
    for (int k = 0; k < count; k++)
        safetensors_close(snapshot[k]);
    safetensors_close(mean);
}

/* Compares with the average of steps last - 4 and last - 2 of the run `earlier`, and of step `last`
 * of `run`. */
static void check_mean_across(const char *earlier, const char *run, int last, double rounding)
{
    char average[64], from[3][64];
    for (int k = 0; k < 3; k++)
        snprintf(from[k], sizeof from[k], "%s/step%d", k < 2 ? earlier : run, last - 4 + 2 * k);
    snprintf(average, sizeof average, "%s/step%d-average", run, last);
    check_mean_of(average, from, 3, rounding);
}

static void check_mean(const char *run, int last, double rounding)
{
    check_mean_across(run, run, last, rounding);
}

static void check_same_losses(const char *a, const char *b)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    losses(x, a, 12);
    losses(y, b, 12);
    for (int i = 1; i <= 12; i++)
        assert_true(x[i] == y[i]);
}

/* Returns the loss that another process computes with the folder. */
static double evaluated(const char *folder_name)
{
    char path[512], line[4096];
    expect_status(train(1, SOME_BATCHES "--eval_only --load_path=%s/%s --save_folder=%s/evaluated",
                        folder, folder_name, folder),
                  0);
    snprintf(path, sizeof path, "%s/evaluated/eval.jsonl", folder);
    FILE *f = fopen(path, "r");
    assert_true(f && fgets(line, sizeof line, f));
    fclose(f);
    shell("rm -r %s/evaluated", folder);
    json_t *o = json_loads(line, 0, NULL);
    const double loss = json_number_value(json_object_get(o, "eval/sample/CrossEntropyLoss"));
    json_decref(o);
    return loss;
}

/* Training is the same as without averages. The averages of steps 6 and 12 are the means, and are
 * evaluated. */
TEST(test_means)
{
    double own[MAX_STEPS], average[MAX_STEPS];
    expect_status(run(1, "plain", "--average=null"), 0);
    expect_status(run(1, "averaged", AVERAGE " --dry_run"), 0);
    expect_output("average in f32");
    expect_status(run(1, "averaged", AVERAGE), 0);
    check_same_losses("plain", "averaged");
    shell("cd %s && cmp plain/step12/model.safetensors averaged/step12/model.safetensors", folder);
    shell("cd %s/averaged && test \"$(ls -d *-average | tr '\\n' ' ')\" = 'step12-average "
          "step6-average ' && "
          "! grep -q average ../plain/step12/trainer.json && test -e step6-average/config.json",
          folder);
    check_mean("averaged", 6, 0);
    check_mean("averaged", 12, 0);
    assert_int_equal(metric(average, "averaged", "eval/average/sample/CrossEntropyLoss"), 2);
    metric(own, "averaged", "eval/sample/CrossEntropyLoss");
    assert_true(average[12] > 0 && average[12] != own[12]);
    assert_true(fabs(evaluated("averaged/step12-average") - average[12]) <= 1e-8 * average[12]);
}

/* Interrupts a run within a group of snapshots, and after the end of a group, before the average
 * was written. */
TEST(test_resumes)
{
    expect_status(run(1, "parts", AVERAGE "--stop_at=3"), 0);
    expect_status(run(1, "parts", AVERAGE "--try_load_latest_save"), 0);
    check_same_losses("averaged", "parts");
    for (int step = 6; step <= 12; step += 6)
        shell("cd %s && cmp averaged/step%d-average/model.safetensors "
              "parts/step%d-average/model.safetensors",
              folder, step, step);
    shell("rm -r %s/parts/step12-average", folder);
    expect_status(run(1, "parts", AVERAGE "--try_load_latest_save"), 0);
    shell("cd %s && cmp averaged/step12-average/model.safetensors "
          "parts/step12-average/model.safetensors",
          folder);
    /* from step 4 on with averaging: the group 2, 4, 6 is incomplete */
    expect_status(run(1, "late", "--stop_at=4"), 0);
    expect_status(run(1, "late", AVERAGE "--try_load_latest_save"), 0);
    assert_false(exists("late/step6-average"));
    check_mean("late", 12, 0);
    /* from step 3 on other snapshots: the snapshot of step 2 is not part of the mean of 3 and 6 */
    expect_status(run(1, "changed", AVERAGE "--stop_at=3"), 0);
    expect_status(
        run(1, "changed", "--average.last=2 --average.every=3 --stop_at=6 --try_load_latest_save"),
        0);
    expect_output("resume: average.last 2, was 3");
    assert_false(exists("changed/step6-average"));
    /* from here on without averaging */
    expect_status(run(1, "without", AVERAGE "--stop_at=8"), 0);
    expect_status(run(1, "without", "--try_load_latest_save"), 0);
    check_same_losses("plain", "without");
    /* going back removes later averages */
    expect_status(
        train(1,
              USUAL AVERAGE
              "--load_path=%s/parts/step8 --save_folder=%s/parts --save_overwrite --stop_at=9",
              folder, folder),
        0);
    assert_true(exists("parts/step6-average") && !exists("parts/step12-average"));
}

/* Averaging is switched off and on again: a checkpoint without the sum has no count. */
TEST(test_off_and_on)
{
    expect_status(run(1, "gap", AVERAGE "--stop_at=2"), 0);
    expect_status(run(1, "gap", "--stop_at=3 --try_load_latest_save"), 0);
    shell("! grep -q average %s/gap/step3/trainer.json", folder);
    expect_status(run(1, "gap", AVERAGE "--stop_at=6 --try_load_latest_save"), 0);
    expect_output("step 6: no average is written: the average has only 2 of 3 snapshots");
    assert_false(exists("gap/step6-average"));
    /* continues in the next group: the two snapshots of the first group must not be counted */
    expect_status(run(1, "long-gap", AVERAGE "--stop_at=4"), 0);
    expect_status(run(1, "long-gap", "--stop_at=11 --try_load_latest_save"), 0);
    expect_status(run(1, "long-gap", AVERAGE "--try_load_latest_save"), 0);
    expect_output("step 12: no average is written: the average has only 1 of 3 snapshots");
    assert_false(exists("long-gap/step12-average"));
}

/* ---- counts and their states ----------------------------------------------------------------- */

/* AdamW's first update: m^2 / v is (1 - 0.9)^2 / (1 - 0.95) for every weight, and not after more
 * updates. 1 - 0.9f is off by 2.4e-7 and 1 - 0.95f by 2.4e-7, both relative; each of five
 * operations by 6e-8. The square of a small gradient is not exact. */
static bool updated_once(const char *checkpoint)
{
    SafeFile *f = open_file(checkpoint, "optimizer-00001.states");
    bool once = true;
    for (int t = 0; t < f->count; t++) {
        char name[128];
        snprintf(name, sizeof name, "%s", f->tensor[t].name);
        char *end = strstr(name, ".exp_avg");
        if (!end || strcmp(end, ".exp_avg") != 0)
            continue;
        size_t n;
        float *m = values_of(f, name, &n);
        strcpy(end, ".exp_avg_sq");
        float *v = values_of(f, name, &n);
        for (size_t i = 0; i < n; i++)
            once &=
                v[i] < 1e-30f || fabs((double)m[i] * (double)m[i] / (double)v[i] / 0.2 - 1) < 2e-6;
        free(m);
        free(v);
    }
    safetensors_close(f);
    return once;
}

/* Counts of snapshots in the average, and of losses in the spike window. */
static void read_counts(const char *checkpoint, int *snapshots, int *losses)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/trainer.json", folder, checkpoint);
    json_t *o = json_load_file(path, 0, NULL);
    const char *window = json_string_value(json_object_get(json_object_get(o, "spikes"), "loss"));
    assert_non_null(window);
    *snapshots = (int)json_integer_value(json_object_get(json_object_get(o, "average"), "count"));
    *losses = *window ? 1 : 0;
    for (; *window; window++)
        *losses += *window == ' ';
    json_decref(o);
}

/* A run that continues from step 4 of "base", whose average contains the snapshots of steps 2 and
 * 4, and the counts in its first checkpoint. converts: its moments are not F32. */
typedef struct {
    const char *name, *how;
    int ranks, step, updates, snapshots, losses, instance;
    bool converts;
    /* the run whose steps 2 and 4 are in step6-average; NULL: no such run */
    const char *average;
} Case;

#define BASE \
    "--scheduler.name=wsd --scheduler.t_decay=2 --optimizer.betas=[0.9,0.95] " \
    "--model.n_kv_heads=2 --save_interval=1 "
#define LOADED "--load_path=%s/base/step4 "

// clang-format off
static const Case cases[] = {
    { "loaded",    LOADED, 1, 5, 5, 2, 5, 40, false, "base" },
    { "optimizer", LOADED "--reset_optimizer_state", 1, 5, 1, 0, 5, 40, false, NULL },
    { "trainer",   LOADED "--reset_trainer_state", 1, 1, 5, 2, 1, 8, false, "trainer" },
    { "both",      LOADED "--reset_trainer_state --reset_optimizer_state", 1, 1, 1, 0, 1, 8, false, "both" },
    { "data",      LOADED "--restore_dataloader=false", 1, 5, 5, 2, 5, 8, false, "base" },
    { "settings",  LOADED "--average.every=1", 1, 5, 5, 1, 5, 40, false, NULL },
    { "eight",     LOADED "--optimizer.name=adamw8bit", 1, 5, 5, 2, 5, 40, true, "base" },
    { "frozen",    LOADED "--trainable=[model.norm.weight] --reset_optimizer_state", 1, 5, 1, 0, 5, 40, false, NULL },
    { "adapters",  LOADED "--lora.rank=2", 1, 1, 1, 0, 1, 8, false, "adapters" },
    { "extended",  "--extend=%s/base/step4 --max_duration=24", 1, 5, 5, 2, 5, 40, false, "base" },
    { "shards",    LOADED "--fsdp.sharding_strategy=FULL_SHARD", 2, 5, 5, 2, 5, 40, false, "base" },
    { "tensor",    LOADED "--parallelism.tensor=2", 2, 5, 5, 2, 5, 40, false, "base" },
    { "stages",    LOADED "--parallelism.pipeline=2", 2, 5, 5, 2, 5, 40, false, "base" },
};
// clang-format on

TEST(test_counts)
{
    expect_status(run(1, "base", BASE AVERAGE "--stop_at=6"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const Case *c = &cases[i];
        char how[512], first[64], average[64];
        int snapshots, losses;
        if (c->ranks > most_ranks())
            continue;
        snprintf(how, sizeof how, c->how, folder);
        snprintf(first, sizeof first, "%s/step%d", c->name, c->step);
        snprintf(average, sizeof average, "%s/step6-average", c->name);
        print_message("%s\n", c->name);
        char more[1024];
        snprintf(more, sizeof more, BASE AVERAGE "--stop_at=6 %s", how);
        expect_status(run(c->ranks, c->name, more), 0);
        read_counts(first, &snapshots, &losses);
        assert_int_equal(trainer(first, "step"), c->step);
        assert_int_equal(trainer(first, "updates"), c->updates);
        assert_int_equal(trainer(first, "instance"), c->instance);
        assert_int_equal(snapshots, c->snapshots);
        assert_int_equal(losses, c->losses);
        assert_true(c->converts || updated_once(first) == (c->updates == 1));
        assert_true(exists(average) == (c->average != NULL));
        if (c->average)
            check_mean_across(c->average, c->name, 6, 0);
        else
            expect_output("step 6: no average is written");
    }
    /* the complete average of step 6 does not count for the new step 0 */
    expect_status(
        train(1,
              USUAL BASE AVERAGE
              "--load_path=%s/base/step6 --reset_trainer_state --stop_at=1 --save_folder=%s/zero",
              folder, folder),
        0);
    assert_true(exists("zero/step1") && !exists("zero/step0-average"));
}

/* A spike ends a run at a step with a snapshot. The saved state is the state before this step. */
TEST(test_spike)
{
    char from[2][64] = { "spike/step33", "after/step66" };
    static const char two[] =
        "--average.last=2 --average.every=33 --max_duration=66 --save_interval=33 "
        "--save_num_checkpoints_to_keep=-1";
    shell("yes | tr 'y\\n' '\\3\\0' | head -c 4000 >%s/same.npy", folder);
    expect_status(train(1, "%s --stop_at=65 --save_folder=%s/spike", two, folder), 0);
    expect_status(train(1,
                        "%s --try_load_latest_save --restore_dataloader=false "
                        "--data.paths=[%s/same.npy] --spikes=stop "
                        "--save_folder=%s/spike",
                        two, folder, folder),
                  STATUS_DIVERGED);
    expect_output("step 66: a spike: loss ");
    expect_status(train(1,
                        "%s --restore_dataloader=false --load_path=%s/spike/step65-aborted "
                        "--save_folder=%s/after",
                        two, folder, folder),
                  0);
    check_mean_of("after/step66-average", from, 2, 0);
}

/* BF16 weights on several ranks, FP8 operands, states in host memory. */
TEST(test_ranks)
{
    expect_status(run(2, "coat", "--recipe=coat --fsdp.sharding_strategy=FULL_SHARD"), 0);
    expect_status(run(2, "coat-averaged",
                      AVERAGE
                      "--recipe=coat --fsdp.sharding_strategy=FULL_SHARD --offload.optimizer=all"),
                  0);
    check_same_losses("coat", "coat-averaged");
    check_mean("coat-averaged", 6, 0x1p-8);
    expect_status(run(2, "moved", AVERAGE "--stop_at=9"), 0);
    expect_status(run(1, "moved", AVERAGE "--try_load_latest_save"), 0);
    check_mean("moved", 12, 0);
}

TEST(test_errors)
{
    expect_status(run(1, "wrong", "--average.last=3"), STATUS_INPUT);
    expect_output("average needs both last and every, as in average: {last: 5, every: 200}; every "
                  "is missing");
    expect_status(run(1, "wrong", "--average.every=3"), STATUS_INPUT);
    expect_output("last is missing");
    assert_false(exists("wrong"));
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
