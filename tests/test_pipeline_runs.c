/* Runs of ./train with pipeline stages: metrics, checkpoints, resumes and the dry run; quantization
 * statistics of tensor ranks. */
#include <math.h>

#include "tests/test.h"
#include "tests/kit.h"
#include "tests/launch.h"

/* Compares all metrics of two runs that do not depend on time; they may differ by this fraction. */
static void expect_close(const char *run, const char *other, double most)
{
    static const char *const names[] = {
        "train/CrossEntropyLoss",     "train/ZLoss",
        "optim/total_grad_norm",      "train/labels",
        "optim/learning_rate_group0", "eval/sample/CrossEntropyLoss"
    };
    for (int k = 0; k < 6; k++) {
        double one[MAX_STEPS], more[MAX_STEPS];
        assert_int_equal(metric(one, run, names[k]), metric(more, other, names[k]));
        for (int i = 0; i < MAX_STEPS; i++)
            if (!(fabs(more[i] - one[i]) <= most * fabs(one[i])) &&
                !(isnan(more[i]) && isnan(one[i])))
                fail_msg("%s, step %d: %.9g in %s, %.9g in %s", names[k], i, more[i], other, one[i],
                         run);
    }
}

static void expect_same(const char *run, const char *other)
{
    expect_close(run, other, 0);
}

/* Reads all quantization statistics of a run, by step. */
static json_t *statistics(const char *run)
{
    static char line[1 << 16];
    char path[256], number[16];
    json_t *all = json_object();
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        if (strstr(line, "\"quant/")) {
            json_t *o = json_loads(line, 0, NULL);
            assert_non_null(o);
            snprintf(number, sizeof number, "%d",
                     (int)json_integer_value(json_object_get(o, "step")));
            json_object_set_new(all, number, o);
        }
    fclose(f);
    return all;
}

/* The metrics have nine digits, and sums over the model are added stage by stage. */
static void expect_same_statistics(const char *run, const char *other)
{
    json_t *one = statistics(run), *more = statistics(other), *line, *value;
    const char *step, *name;
    int compared = 0;
    assert_int_equal(json_object_size(one), json_object_size(more));
    json_object_foreach(one, step, line)
    {
        json_t *found = json_object_get(more, step);
        assert_int_equal(json_object_size(line), json_object_size(found));
        json_object_foreach(line, name, value)
        {
            const json_t *x = json_object_get(found, name);
            const double a = json_number_value(value), b = json_number_value(x);
            const bool same = json_is_real(value) ? json_is_real(x) && fabs(a - b) <= 1e-8 * fabs(a)
                                                  : json_equal(value, x);
            if (strncmp(name, "quant/", 6) != 0)
                continue;
            if (!same)
                fail_msg("step %s: %s is %.17g in %s, %.17g in %s", step, name, b, other, a, run);
            compared++;
        }
    }
    assert_true(compared > 300);
    json_decref(one);
    json_decref(more);
}

/* Stages train, evaluate, measure and save the bits of one rank, even if the number of stages
 * changes in the middle of the run. */
TEST(test_pipeline)
{
    static const char settings[] =
        "--recipe=coat --model.weight_tying=false --model.n_layers=4 --data.generate_doc_lengths "
        "--softmax_auxiliary_loss --device_train_microbatch_size=1 --eval_interval=3 "
        "--max_duration=6 "
        "--quant_stats_interval=2";
    static const char chunks[] =
        "--parallelism.pipeline_schedule=Interleaved1F1B --parallelism.pipeline_virtual_stages=2";
    char command[1024];
    needs_ranks(2);
    expect_status(train(1, "%s --save_folder=%s/no-stages", settings, folder), 0);
    expect_status(train(2, "%s --parallelism.pipeline=2 --stop_at=3 --save_folder=%s/stages",
                        settings, folder),
                  0);
    expect_output("pipeline: 2 stages, 1F1B, 8 micro-batches a step; if all micro-batches take the "
                  "same time, stages wait for each other 11.1 %");
    if (most_ranks() < 4)
        expect_status(
            train(2,
                  "%s --parallelism.pipeline=2 %s --try_load_latest_save --save_folder=%s/stages",
                  settings, chunks, folder),
            0);
    else
        expect_status(
            train(4, "%s --parallelism.pipeline=4 --try_load_latest_save --save_folder=%s/stages",
                  settings, folder),
            0);
    expect_same("no-stages", "stages");
    expect_same_statistics("no-stages", "stages");
    snprintf(command, sizeof command,
             "for f in %s/no-stages/step6/*.s*; do cmp $f %s/stages/step6/$(basename $f) || "
             "exit 1; done",
             folder, folder);
    assert_int_equal(system(command), 0);
    expect_status(train(1, "%s --dry_run --ranks=4 --device_memory=1 --parallelism.pipeline=2 %s",
                        settings, chunks),
                  0);
    expect_output("stage 0: the embedding to block 0, block 2; activations of 6 micro-batches, "
                  "each in one virtual stage; ");
    expect_output("stage 1: block 1, block 3 to the head; ");
    expect_output("memory plan of a rank of stage 0, GiB");
}

/* The part of the first one's size by which two numbers may differ. Both ranks read the same first
 * tokens: in the first block, before sums over ranks, their numbers are equal. An error is that of
 * roundings to E4M3, whatever the scale; of a part with a scale of its own it differs by the part
 * of a binade that its largest number is in. Kurtosis and the largest channel depend on few large
 * numbers: rounding changes each by 2^-4 of its size at most, so its fourth power by four times that
 * and the ratio of two numbers by twice that. If the parts were not added, kurtosis would be half.
 * What depends on the smallest numbers is chance. */
static double most_apart(const char *name)
{
    const bool exact =
        strncmp(name, "quant/x0/0/", 11) == 0 || strncmp(name, "quant/h0/0/", 11) == 0;
    const bool first = strncmp(name, "quant/act/0/", 12) == 0;
    const char *statistic = strrchr(name, '/') + 1;
    if (exact)
        return 1e-8;
    if (strcmp(statistic, "kurtosis") == 0)
        return first ? 4 * 0x1p-4 : INFINITY;
    if (strcmp(statistic, "largest_channel") == 0)
        return first ? 2 * 0x1p-4 : INFINITY;
    /* not in E4M3 in this recipe */
    const bool of_moments = strncmp(name, "quant/m/", 8) == 0 || strncmp(name, "quant/v/", 8) == 0;
    return strcmp(statistic, "error") == 0 && !of_moments && !strstr(name, "/optimizer/")
               ? 0.25
               : INFINITY;
}

/* Sets the first half of this tensor in a safetensors file to 0. */
static void clear_half(const char *path, const char *name)
{
    FILE *f = fopen(path, "r+");
    uint64_t length;
    assert_non_null(f);
    assert_int_equal(fread(&length, sizeof length, 1, f), 1);
    char *text = malloc(length);
    assert_int_equal(fread(text, 1, length, f), length);
    json_t *header = json_loadb(text, length, 0, NULL),
           *offsets = json_object_get(json_object_get(header, name), "data_offsets");
    const long begin = (long)json_integer_value(json_array_get(offsets, 0)),
               end = (long)json_integer_value(json_array_get(offsets, 1));
    assert_true(end > begin);
    fseek(f, (long)(sizeof length + length) + begin, SEEK_SET);
    for (long i = 0; i < (end - begin) / 2; i++)
        fputc(0, f);
    fclose(f);
    json_decref(header);
    free(text);
}

/* Tensor ranks measure their slices of activations, and report the same statistics, all of them.
 * The first rank's slice of the first block's hidden activations is 0, so this rank has no
 * statistics of its own. */
TEST(test_tensor_statistics)
{
    static const char settings[] =
        "--recipe=coat-act --model.n_kv_heads=2 --device_train_microbatch_size=4 --max_duration=1 "
        "--quant_stats_interval=1";
    const char *name;
    json_t *value;
    int compared = 0;
    needs_ranks(2);
    char command[512], path[256];
    expect_status(train(1, "--model.n_kv_heads=2 --max_duration=1 --save_folder=%s/first", folder),
                  0);
    snprintf(
        command, sizeof command,
        "mkdir %s/base && cp %s/first/step1/config.json %s/first/step1/model.safetensors %s/base",
        folder, folder, folder, folder);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, "%s/base/model.safetensors", folder);
    clear_half(path, "model.layers.0.mlp.up_proj.weight");
    expect_status(
        train(1, "%s --load_path=%s/base --save_folder=%s/whole", settings, folder, folder), 0);
    expect_status(train(2, "%s --load_path=%s/base --parallelism.tensor=2 --save_folder=%s/parts",
                        settings, folder, folder),
                  0);
    json_t *one = statistics("whole"), *two = statistics("parts");
    json_t *whole = json_object_get(one, "1"), *parts = json_object_get(two, "1");
    assert_int_equal(json_object_size(whole), json_object_size(parts));
    json_object_foreach(whole, name, value)
    {
        const json_t *part = json_object_get(parts, name);
        const double a = json_number_value(value), b = json_number_value(part);
        assert_non_null(part);
        if (!json_is_real(value) || strncmp(name, "quant/", 6) != 0 || isinf(most_apart(name)))
            continue;
        if (!(fabs(a - b) <= most_apart(name) * fabs(a)))
            fail_msg("%s is %.9g on one rank, %.9g on two", name, a, b);
        compared++;
    }
    assert_true(compared > 20);
    json_decref(one);
    json_decref(two);
}

/* One of two stages has trained parameters, and offloads their master weights. */
TEST(test_host_of_one_stage)
{
    static const char settings[] = "--recipe=bf16 --model.weight_tying=false "
                                   "--trainable=[model.layers.0.*] --offload.master=all "
                                   "--optimizer.name=adamw8bit --max_duration=3 --eval_interval=3";
    needs_ranks(2);
    expect_status(train(1, "%s --save_folder=%s/one-stage", settings, folder), 0);
    expect_status(
        train(2, "%s --parallelism.pipeline=2 --save_folder=%s/two-stages", settings, folder), 0);
    expect_same("one-stage", "two-stages");
}

/* The matrix that is both embedding and head is in files once, with its checksum, and each mesh
 * reads it. Gradients are F32; 8 micro-batches are added in another order. */
TEST(test_tied)
{
    static const char settings[] =
        "--softmax_auxiliary_loss --max_duration=4 --eval_interval=1 --save_interval=2";
    needs_ranks(2);
    expect_status(train(1, "%s --save_folder=%s/alone", settings, folder), 0);
    expect_status(
        train(2, "%s --parallelism.pipeline=2 --stop_at=2 --save_folder=%s/tied", settings, folder),
        0);
    shell("cd %s && test $(stat -c %%s tied/step2/model.safetensors) = $(stat -c %%s "
          "alone/step4/model.safetensors)",
          folder);
    expect_status(
        train(1, "%s --try_load_latest_save --stop_at=3 --save_folder=%s/tied", settings, folder),
        0);
    expect_status(train(most_ranks() < 4 ? 2 : 4,
                        "%s --parallelism.pipeline=2 --try_load_latest_save --save_folder=%s/tied",
                        settings, folder),
                  0);
    expect_close("alone", "tied", 2e-6);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
