/* The program itself against torch: ./train tests/golden/train/config.yaml; scripts/golden_train.py
 * made the same steps with transformers, torch.optim.AdamW and numpy's order of the data. The run
 * has two micro-batches per step, labels distributed unevenly over ranks, a warmup of the rate and
 * of clipping, norms above and below the limit, z-loss, a second epoch, and a step that is not
 * finite and makes no update. metrics.jsonl of each step must agree, and the final weights.
 *
 * Bounds, as in test_parity: loss and z-loss to 1e-5 of themselves, the norm to 1e-4, the rate to
 * the 9 digits of metrics.jsonl. Weights: gradients, which are below 1, have errors of up to 3e-6
 * of the largest, and AdamW divides them by at least its eps, 1e-3. So a step has an error of at
 * most 3e-3 of the rate where gradients are small, and a tenth of that elsewhere: 1e-3 of the
 * change of a tensor in the run. golden_train.py tries seven wrong steps; each gives an error of at
 * least 0.05 of it. */
#include "tests/test.h"
#include "tests/launch.h"

#include "model/checkpoint/safetensors.h"

enum { STEPS = 8 };
static const char golden_path[] = "tests/golden/train/golden.safetensors";

/* Returns an F32 tensor, malloc'ed, and its number of elements. */
static float *read_tensor(const SafeFile *f, const char *name, size_t *count)
{
    const SafeTensor *t = safetensors_find(f, name);
    if (!t || strcmp(t->dtype, "F32") != 0)
        fail_msg("%s: no %s in F32", f->path, name);
    *count = (t->end - t->begin) / sizeof(float);
    float *x = malloc(sizeof *x * *count);
    assert_non_null(x);
    safetensors_read(f, x, t, 0, t->end - t->begin);
    return x;
}

/* A metric of each step; null if torch's value is not finite. */
static void check_metric(const SafeFile *golden, const char *run, const char *key, const char *name,
                         double bound)
{
    double found[MAX_STEPS];
    size_t count;
    float *expected = read_tensor(golden, name, &count);
    assert_int_equal(count, STEPS);
    assert_int_equal(metric(found, run, key), STEPS);
    for (int i = 0; i < STEPS; i++)
        if (isfinite(expected[i]) ? !(fabs(found[i + 1] - expected[i]) <= bound * expected[i])
                                  : !isnan(found[i + 1]))
            fail_msg("%s, step %d: %s is %.9g, by torch %.9g", run, i + 1, key, found[i + 1],
                     expected[i]);
    free(expected);
}

static double distance(const float *x, const float *y, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    return sqrt(sum);
}

/* Compares every tensor that torch trained, and no other. */
static void check_weights(const SafeFile *golden, const char *run)
{
    char path[512], name[160];
    snprintf(path, sizeof path, "%s/%s/step%d/model.safetensors", folder, run, STEPS);
    SafeFile *trained = safetensors_open(path),
             *start = safetensors_open("tests/golden/train/start/model.safetensors");
    int left = trained->count;
    for (int i = 0; i < golden->count; i++) {
        const char *of = golden->tensor[i].name, *prefix = "trained.";
        size_t n, m, k;
        if (strncmp(of, prefix, strlen(prefix)) != 0)
            continue;
        snprintf(name, sizeof name, "%s", of + strlen(prefix));
        float *x = read_tensor(trained, name, &n), *y = read_tensor(golden, of, &m),
              *before = read_tensor(start, name, &k);
        assert_true(n == m && n == k);
        const double off = distance(x, y, n) / distance(before, y, n);
        if (!(off <= 1e-3))
            fail_msg("%s, %s after %d steps: off by %.2g of its change", run, name, STEPS, off);
        free(x), free(y), free(before);
        left--;
    }
    assert_int_equal(left, 0);
    safetensors_close(trained);
    safetensors_close(start);
}

static void run_program(int ranks, const char *run, const char *arguments)
{
    expect_status(
        finish(start_command(
            "%s -n %d %s/train tests/golden/train/config.yaml --device_train_microbatch_size=%d "
            "--save_folder=%s/%s --try_load_latest_save %s",
            setting("LAUNCH", "mpirun --oversubscribe"), ranks, setting("BUILD", "build/cpu"),
            4 / ranks, folder, run, arguments)),
        0);
}

/* stop: also makes a run that stops after this step, and a resume. */
static const struct {
    const char *name;
    int ranks;
    const char *arguments;
    int stop;
} runs[] = {
    { "one", 1, "" },
    { "one-continued", 1, "", 5 },
    { "two", 2, "" },
    { "two-replicas", 2, "--fsdp.sharding_strategy=NO_SHARD" },
    { "two-sum-often", 2,
      "--fsdp.sharding_strategy=SHARD_GRAD_OP --fsdp.grad_sync_mode=micro_batch" },
    { "four-continued", 4,
      "--fsdp.sharding_strategy=HYBRID_SHARD --fsdp.hybrid_sharding_num_model_replicas=2", 4 },
};

TEST(test_steps)
{
    SafeFile *golden = safetensors_open(golden_path);
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        const char *run = runs[i].name;
        char stop[160];
        if (!can_run(runs[i].ranks, run))
            continue;
        snprintf(stop, sizeof stop, "--stop_at=%d %s", runs[i].stop, runs[i].arguments);
        if (runs[i].stop)
            run_program(runs[i].ranks, run, stop);
        run_program(runs[i].ranks, run, runs[i].arguments);
        check_metric(golden, run, "train/CrossEntropyLoss", "loss", 1e-5);
        check_metric(golden, run, "train/ZLoss", "zloss", 1e-5);
        check_metric(golden, run, "optim/total_grad_norm", "norm", 1e-4);
        check_metric(golden, run, "optim/learning_rate_group0", "rate", 1e-7);
        check_metric(golden, run, "train/labels", "labels", 0);
        check_metric(golden, run, "optim/clipping_rate", "clipped", 0);
        check_weights(golden, run);
    }
    safetensors_close(golden);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
