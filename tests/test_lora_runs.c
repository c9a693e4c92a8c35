/* Runs with adapters as a user starts them. They resume bit for bit on any number of ranks; their
 * base does not change; their folder suffices to evaluate, generate and export. test_resume_ranks
 * has more recipes and strategies. */
#include "tests/test.h"
#include "tests/launch.h"

static const char evaluators[] =
    "--eval_subset_num_batches=10 "
    "--evaluators='[{label: val, data: {paths: [build/few-ids/val.npy]}}]'";

static const char metric_name[] = "eval/val/CrossEntropyLoss";

/* Adapters on a model that another run has trained. */
static int adapt(int ranks, const char *run, const char *format, ...)
{
    const int started = ranks < most_ranks() ? ranks : most_ranks();
    char arguments[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    return train(started,
                 "--load_path=%s/base/latest --lora.rank=4 --lora.alpha=16 --max_duration=4 "
                 "--eval_interval=4 %s "
                 "--device_eval_batch_size=%d --save_folder=%s/%s %s",
                 folder, evaluators, 4 / started, folder, run, arguments);
}

static int make_base(void **state)
{
    if (make_folder(state) != 0)
        return -1;
    const int status = train(1, "--max_duration=3 --save_folder=%s/base", folder);
    shell("cd %s/base && find . -type f | sort | xargs cksum >../before", folder);
    return status;
}

static int check_base(void **state)
{
    shell("cd %s/base && find . -type f | sort | xargs cksum | cmp - ../before", folder);
    return remove_folder(state);
}

/* Adapters, states and trainer.json, which has their checksums, equal those of an uninterrupted
 * run. Then the run continues with another base, which the log reports. */
TEST(test_resume)
{
    static const char *const files[] = { "adapter_model.safetensors", "adapter_config.json",
                                         "trainer.json", "optimizer-00001.states" };
    double a[MAX_STEPS], b[MAX_STEPS];
    expect_status(adapt(2, "whole", ""), 0);
    expect_status(adapt(2, "again", "--stop_at=2"), 0);
    expect_status(adapt(2, "again", "--try_load_latest_save"), 0);
    expect_output("at step 2 of 4");
    assert_null(strstr(output, "resume:"));
    for (int i = 0; i < 4; i++)
        shell("cd %s && cmp whole/step4/%s again/step4/%s", folder, files[i], files[i]);
    shell("test \"$(cd %s/again/step4 && ls | tr '\\n' ' ')\" = 'adapter_config.json "
          "adapter_model.safetensors config.yaml "
          "optimizer-00001.states trainer.json '",
          folder);
    losses(a, "whole", 4);
    losses(b, "again", 4);
    assert_memory_equal(a + 1, b + 1, 4 * sizeof *a);
    expect_status(adapt(1, "again", "--try_load_latest_save --lora.base=nf4 --max_duration=5"), 0);
    expect_output("resume: lora.base nf4, was null");
    assert_int_equal(trainer("again/step5", "step"), 5);
}

/* The result of an evaluation of `load_path`. */
static double evaluated(int ranks, const char *load_path)
{
    double value[MAX_STEPS];
    shell("rm -rf %s/eval", folder);
    expect_status(finish(start_command("%s -n %d %s/train --eval_only --load_path=%s/%s "
                                       "--recipe=f32 --device_eval_batch_size=%d "
                                       "%s --save_folder=%s/eval",
                                       setting("LAUNCH", "mpirun --oversubscribe"), ranks,
                                       setting("BUILD", "build/cpu"), folder, load_path, 4 / ranks,
                                       evaluators, folder)),
                  0);
    shell("mv %s/eval/eval.jsonl %s/eval/metrics.jsonl", folder, folder);
    assert_int_equal(metric(value, "eval", metric_name), 1);
    for (int i = 0; i < MAX_STEPS; i++)
        if (!isnan(value[i]))
            return value[i];
    return NAN;
}

static void generated(char *text, size_t size, int ranks, const char *load_path)
{
    expect_status(
        finish(start_command(
            "%s -n %d %s/train --generate=%s/prompts.jsonl --load_path=%s/%s --recipe=f32 "
            "--max_new_tokens=12",
            setting("LAUNCH", "mpirun --oversubscribe"), ranks, setting("BUILD", "build/cpu"),
            folder, folder, load_path)),
        0);
    const char *line = strstr(output, "{\"prompt\"");
    if (!line)
        fail_msg("no continuation: %s", output);
    snprintf(text, size, "%.*s", (int)strcspn(line, "\n"), line);
}

/* The adapters' folder gives the results of the run's end and of the exported model. The results of
 * the base differ. */
TEST(test_alone)
{
    double value[MAX_STEPS];
    char adapted[2048], merged[2048];
    shell("printf '[5, 6, 7]\\n' >%s/prompts.jsonl", folder);
    metric(value, "whole", metric_name);
    for (int ranks = 1; ranks <= 2 && ranks <= most_ranks(); ranks++)
        assert_true(fabs(evaluated(ranks, "whole/latest") - value[4]) <= 1e-6 * value[4]);
    assert_true(fabs(evaluated(1, "base/latest") - value[4]) > 1e-4 * value[4]);
    expect_status(finish(start_command("%s/train --export=%s/whole --dtype=f32 %s/merged",
                                       setting("BUILD", "build/cpu"), folder, folder)),
                  0);
    expect_output("/base/step3 (unchanged) merged with the adapters of ");
    expect_output("/whole/step4:");
    assert_true(fabs(evaluated(1, "merged") - value[4]) <= 1e-6 * value[4]);
    generated(merged, sizeof merged, 1, "merged");
    generated(adapted, sizeof adapted, most_ranks() > 1 ? 2 : 1, "whole/latest");
    assert_string_equal(adapted, merged);
}

/* Adapters on a BF16 base that trained in F32 are evaluated in F32, with the bits of the run's
 * end. */
TEST(test_base_in_bf16)
{
    double value[MAX_STEPS];
    expect_status(
        adapt(
            1, "bf16-base",
            "--recipe=f32 --lora.base=bf16 --scheduler.t_warmup=0 --optimizer.learning_rate=0.05"),
        0);
    metric(value, "bf16-base", metric_name);
    assert_true(evaluated(1, "bf16-base/latest") == value[4]);
}

/* No run overwrites the base of its adapters; a missing base is reported. */
TEST(test_refused)
{
    expect_status(
        train(1, "--load_path=%s/base/step3 --lora.rank=4 --max_duration=4 --save_folder=%s/base",
              folder, folder),
        STATUS_INPUT);
    expect_output("base/step3, the base of the adapters (lora.rank 4), is in save_folder ");
    expect_output(": give the adapters a save_folder of their own");
    expect_status(train(1,
                        "--load_path=%s/base/step3 --lora.rank=4 --max_duration=4 "
                        "--save_folder=%s/base/step3 --save_overwrite",
                        folder, folder),
                  STATUS_INPUT);
    expect_output("base/step3, the base of the adapters (lora.rank 4), is in save_folder ");
    shell("cp -r %s/base %s/copy", folder, folder);
    expect_status(
        train(1,
              "--load_path=%s/copy/latest --lora.rank=4 --max_duration=2 --save_folder=%s/orphan",
              folder, folder),
        0);
    expect_status(
        train(
            1,
            "--load_path=%s/orphan/latest --max_duration=3 --save_folder=%s/copy --save_overwrite",
            folder, folder),
        STATUS_INPUT);
    expect_output("copy/step3, the base of the adapters (lora.rank 4), is in save_folder ");
    shell("mv %s/copy %s/moved", folder, folder);
    expect_status(train(1,
                        "--load_path=%s/orphan/latest --max_duration=3 --save_folder=%s/orphan "
                        "--try_load_latest_save",
                        folder, folder),
                  STATUS_INPUT);
    expect_output(
        "copy/step3: there is no such folder; give the model's folder: --lora.base_path=FOLDER");
    expect_status(train(1,
                        "--load_path=%s/orphan/latest --lora.base_path=%s/moved/latest "
                        "--max_duration=3 --save_folder=%s/orphan "
                        "--try_load_latest_save",
                        folder, folder, folder),
                  0);
    expect_output("at step 2 of 3");
    assert_null(strstr(output, "are now used with"));
    shell("grep -q '\"base_model_name_or_path\": \".*/moved/step3\"' "
          "%s/orphan/step3/adapter_config.json",
          folder);
}

static int on_one(const char *arguments)
{
    return finish(start_command("%s/train %s", setting("BUILD", "build/cpu"), arguments));
}

/* If a base was trained further in place, it is a different base: older adapters on it are not
 * continued, evaluated or merged. With the path of another folder, adapters can be evaluated on
 * that folder, but not trained. */
TEST(test_other_base)
{
    static const char says[] =
        "these adapters were trained with a base whose weights differ from the weights in ";
    char arguments[1024];
    shell("cd %s && cp -r base/step3 place", folder);
    expect_status(
        train(1, "--load_path=%s/place --lora.rank=4 --max_duration=2 --save_folder=%s/beside",
              folder, folder),
        0);
    expect_status(train(1, "--seed=7 --max_duration=1 --save_folder=%s/other", folder), 0);
    shell("cd %s && mv place first && cp -r other/step1 place", folder);
    expect_status(train(1,
                        "--load_path=%s/place --lora.rank=4 --max_duration=3 "
                        "--save_folder=%s/beside --try_load_latest_save",
                        folder, folder),
                  STATUS_INPUT);
    expect_output(says);
    snprintf(arguments, sizeof arguments, "--eval_only --load_path=%s/beside/latest %s", folder,
             evaluators);
    expect_status(on_one(arguments), STATUS_INPUT);
    expect_output(says);
    snprintf(arguments, sizeof arguments, "--export=%s/beside %s/into", folder, folder);
    expect_status(on_one(arguments), STATUS_INPUT);
    expect_output(says);
    shell("test ! -e %s/into", folder);
    expect_status(train(1,
                        "--load_path=%s/first --lora.rank=4 --max_duration=3 "
                        "--save_folder=%s/beside --try_load_latest_save",
                        folder, folder),
                  0);
    assert_null(strstr(output, "are now used with"));
    snprintf(arguments, sizeof arguments,
             "--eval_only --load_path=%s/beside/latest --lora.base_path=%s/place %s", folder,
             folder, evaluators);
    expect_status(on_one(arguments), 0);
    expect_output("place, which has other weights");
    expect_status(train(1,
                        "--load_path=%s/place --lora.rank=4 --max_duration=4 "
                        "--save_folder=%s/beside --try_load_latest_save",
                        folder, folder),
                  STATUS_INPUT);
    expect_output(says);
}

int main(void)
{
    return run_all_tests(make_base, check_base);
}
