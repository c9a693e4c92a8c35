/* Runs with `average`: the mean of the snapshots in double, the same training as without it,
 * evaluation, resumes. */
#include "model/checkpoint/safetensors.h"
#include "tests/launch.h"

#define USUAL \
    "--save_interval=2 --save_num_checkpoints_to_keep=-1 --eval_interval=4 --max_duration=12 "
#define AVERAGE "--average.last=3 --average.every=2 "

static int run(int ranks, const char *name, const char *more)
{
    return train(ranks, USUAL "--save_folder=%s/%s %s", folder, name, more);
}

static SafeFile *open_weights(const char *checkpoint)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/model.safetensors", folder, checkpoint);
    return safetensors_open(path);
}

/* BF16 and F32 as floats; the caller frees it. */
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

/* The average of steps last - 4, last - 2 and last against the mean in double. Each of two F32
 * updates has four roundings of numbers up to 2 max|x|, so 16 units of 2^-24 max|x| bound their
 * sum; a BF16 result is rounded once more, by 2^-8 at most. */
static void check_mean(const char *run, int last, double rounding)
{
    char name[64];
    SafeFile *from[3], *mean;
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "%s/step%d", run, last - 4 + 2 * k);
        from[k] = open_weights(name);
    }
    snprintf(name, sizeof name, "%s/step%d-average", run, last);
    mean = open_weights(name);
    assert_true(mean->count > 0 && mean->count == from[0]->count);
    for (int t = 0; t < mean->count; t++) {
        size_t n;
        float *x[3], *y = values_of(mean, mean->tensor[t].name, &n);
        for (int k = 0; k < 3; k++)
            x[k] = values_of(from[k], mean->tensor[t].name, &n);
        for (size_t i = 0; i < n; i++) {
            const double exact = ((double)x[0][i] + (double)x[1][i] + (double)x[2][i]) / 3;
            const double most =
                fmax(fabs((double)x[0][i]), fmax(fabs((double)x[1][i]), fabs((double)x[2][i])));
            if (!(fabs((double)y[i] - exact) <= 16 * 0x1p-24 * most + rounding * fabs(exact)))
                fail_msg("%s, element %zu: %.9g, expected %.9g", mean->tensor[t].name, i,
                         (double)y[i], exact);
        }
        free(y);
        for (int k = 0; k < 3; k++)
            free(x[k]);
    }
    for (int k = 0; k < 3; k++)
        safetensors_close(from[k]);
    safetensors_close(mean);
}

static void check_same_losses(const char *a, const char *b)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    losses(x, a, 12);
    losses(y, b, 12);
    for (int i = 1; i <= 12; i++)
        assert_true(x[i] == y[i]);
}

/* The loss that another process finds with the folder. */
static double evaluated(const char *folder_name)
{
    char path[512], line[4096];
    expect_status(train(1, "--eval_only --load_path=%s/%s --save_folder=%s/evaluated", folder,
                        folder_name, folder),
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

/* Training is the same; the averages at 6 and 12 are the means, and are evaluated. */
static void test_means(void **state)
{
    (void)state;
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

/* Interrupted within a group of snapshots, and after its end before the average was written. */
static void test_resumes(void **state)
{
    (void)state;
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
    /* from step 4 on with the average: the group 2, 4, 6 is not complete */
    expect_status(run(1, "late", "--stop_at=4"), 0);
    expect_status(run(1, "late", AVERAGE "--try_load_latest_save"), 0);
    assert_false(exists("late/step6-average"));
    check_mean("late", 12, 0);
    /* other snapshots from step 3 on: one of step 2 is no part of the mean of 3 and 6 */
    expect_status(run(1, "changed", AVERAGE "--stop_at=3"), 0);
    expect_status(
        run(1, "changed", "--average.last=2 --average.every=3 --stop_at=6 --try_load_latest_save"),
        0);
    expect_output("resume: average.last 2, was 3");
    assert_false(exists("changed/step6-average"));
    /* and without it again */
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

/* Weights in BF16 on several ranks, FP8 operands; states in host memory. */
static void test_ranks(void **state)
{
    (void)state;
    expect_status(run(2, "coat", "--recipe=coat --fsdp.sharding_strategy=FULL_SHARD"), 0);
    expect_status(run(2, "coat-averaged",
                      AVERAGE
                      "--recipe=coat --fsdp.sharding_strategy=FULL_SHARD --host.moments=all"),
                  0);
    check_same_losses("coat", "coat-averaged");
    check_mean("coat-averaged", 6, 0x1p-8);
    expect_status(run(2, "moved", AVERAGE "--stop_at=9"), 0);
    expect_status(run(1, "moved", AVERAGE "--try_load_latest_save"), 0);
    check_mean("moved", 12, 0);
}

static void test_errors(void **state)
{
    (void)state;
    expect_status(run(1, "wrong", "--average.last=3"), 1);
    expect_output("average needs both last and every, as in average: {last: 5, every: 200}; every "
                  "is missing");
    expect_status(run(1, "wrong", "--average.every=3"), 1);
    expect_output("last is missing");
    assert_false(exists("wrong"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_means),
        cmocka_unit_test(test_resumes),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
