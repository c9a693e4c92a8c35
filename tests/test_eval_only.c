/* ./train --eval_only computes the numbers of the run's end, on any number of ranks, without the
 * run's data. Also files that must not change. */
#include "tests/test.h"
#include "tests/launch.h"
#include "tests/sanitized.h"

static char evaluators[1024];

static const char *const names[] = { "eval/val/CrossEntropyLoss", "eval/downstream/made_acc",
                                     "eval/downstream/made_bpb",
                                     "eval/downstream/made_len_norm_v2" };
enum { NAMES = sizeof names / sizeof names[0] };

/* Validation shards, and 20 questions. */
static int make_evaluators(void **state)
{
    if (make_folder(state) != 0)
        return -1;
    char path[128];
    snprintf(path, sizeof path, "%s/made.jsonl", folder);
    FILE *f = fopen(path, "w");
    fprintf(f, "{\"task\": \"made\", \"metric\": \"acc\", \"questions\": 20}\n");
    for (int q = 0; q < 20 && f; q++)
        fprintf(f,
                "{\"gold\": %d, \"choices\": [{\"tokens\": [%d, %d, %d], \"continuation\": 2, "
                "\"characters\": 7, \"bytes\": 8}, "
                "{\"tokens\": [%d, %d], \"continuation\": 1, \"characters\": 5, \"bytes\": 5}]}\n",
                q % 2, 49 * q, 7 * q, 500 + q, 49 * q, 300 + 11 * q);
    snprintf(evaluators, sizeof evaluators,
             "--eval_subset_num_batches=20 --evaluators='[{label: val, data: {paths: "
             "[build/few-ids/val.npy]}}, {label: made, type: downstream, data: {paths: [%s]}}]'",
             path);
    return f ? fclose(f) : -1;
}

/* Reads the last values in the folder's file. */
static void read_results(double value[NAMES], const char *run, const char *file, long step)
{
    double of_step[MAX_STEPS];
    shell("cp %s/%s/%s %s/metrics.jsonl", folder, run, file, folder);
    for (int i = 0; i < NAMES; i++) {
        if (metric(of_step, ".", names[i]) == 0)
            fail_msg("%s/%s has no %s", run, file, names[i]);
        value[i] = of_step[step];
    }
}

static double trained[NAMES];

TEST(test_in_training)
{
    expect_status(
        train(
            1,
            "--max_duration=2 --eval_interval=2 --device_eval_batch_size=2 %s --save_folder=%s/run",
            evaluators, folder),
        0);
    expect_output("| made | acc 0.");
    read_results(trained, "run", "metrics.jsonl", 2);
    assert_true(trained[1] > 0 && trained[1] < 1);
}

/* The order of sums differs, as between numbers of ranks in test_train. */
static void check_results(const char *run)
{
    double found[NAMES];
    read_results(found, run, "eval.jsonl", 2);
    for (int i = 0; i < NAMES; i++)
        if (!(fabs(found[i] - trained[i]) <= 256 * 0x1p-24 * trained[i]))
            fail_msg("%s, %s: %.9g, in training %.9g", run, names[i], found[i], trained[i]);
}

/* The batch sizes are invalid for training steps, and there are no training data: evaluation needs
 * neither. */
TEST(test_alone)
{
    for (int ranks = 1; ranks <= 2 && ranks <= most_ranks(); ranks++) {
        expect_status(train(ranks,
                            "--eval_only --load_path=%s/run/step2 --device_eval_batch_size=%d "
                            "--global_train_batch_size=7 "
                            "--data.paths=[s3://no/such.npy] %s --save_folder=%s/only%d",
                            folder, 2 / ranks, evaluators, folder, ranks),
                      0);
        char name[32];
        snprintf(name, sizeof name, "only%d", ranks);
        check_results(name);
        shell("test \"$(ls %s/%s)\" = eval.jsonl", folder, name);
    }
}

/* Results are appended to eval.jsonl in the run's folder, which otherwise does not change, even
 * with save_overwrite. Without a folder, the results are only printed. */
TEST(test_folder_stays)
{
    shell("cd %s/run && find . -type f | sort | xargs cksum >../before", folder);
    for (int i = 0; i < 2; i++)
        expect_status(
            train(
                1,
                "--eval_only --try_load_latest_save --save_overwrite --device_eval_batch_size=2 %s "
                "--save_folder=%s/run",
                evaluators, folder),
            0);
    check_results("run");
    shell("test $(wc -l <%s/run/eval.jsonl) = 4 && rm %s/run/eval.jsonl", folder, folder);
    expect_status(train(1,
                        "--eval_only --load_path=%s/run/latest %s --save_folder=null "
                        "--run_name=eval-only-left-this",
                        folder, evaluators),
                  0);
    expect_output("| made | acc 0.");
    shell("test ! -e runs/eval-only-left-this");
    shell("cd %s/run && find . -type f | sort | xargs cksum | cmp - ../before", folder);
}

/* An evaluation that a run missed at its end is made once, and no other evaluation is made. */
TEST(test_owed)
{
    shell("sed -i '$d' %s/run/metrics.jsonl", folder);
    for (int i = 0; i < 2; i++) {
        expect_status(train(1,
                            "--max_duration=2 --eval_interval=2 --device_eval_batch_size=2 %s "
                            "--try_load_latest_save "
                            "--save_folder=%s/run",
                            evaluators, folder),
                      0);
        if (i == 0)
            expect_output("eval at step 2 | made");
        assert_null(strstr(output, i == 0 ? "| val |" : "eval at step"));
    }
}

/* The run's numbers bit for bit, from its checkpoint alone, which has all settings. They are
 * appended to earlier evaluations, after a truncated line was removed. */
TEST(test_as_the_run)
{
    static const char *const runs[] = {
        ("--recipe=coat --fp8.forward=saved --device_train_microbatch_size=4 "
         "--device_eval_batch_size=6"),
        "--recipe=coat --format.master=f32 --format.grads=f32",
        "--recipe=f32 --format.frozen=bf16",
        "--recipe=bf16 --format.operand=e4m3 --format.gradient=e5m2",
        "--recipe=f32 --data.generate_doc_lengths",
        "--recipe=coat --trainable=[model.layers.1.*] --format.frozen=f32",
    };
    double found[NAMES];
    for (size_t r = 0; r < (SANITIZED ? 1 : sizeof runs / sizeof runs[0]); r++) {
        expect_status(train(1, "%s --max_duration=2 --eval_interval=2 %s --save_folder=%s/as%zu",
                            runs[r], evaluators, folder, r),
                      0);
        char name[16];
        snprintf(name, sizeof name, "as%zu", r);
        read_results(trained, name, "metrics.jsonl", 2);
        shell("printf '{\"step\": 1}\\n{\"st' >%s/as%zu/eval.jsonl", folder, r);
        expect_status(
            finish(start_command(
                "%s/train --eval_only --load_path=%s/as%zu/step2 %s --save_folder=%s/as%zu",
                setting("BUILD", "build/cpu"), folder, r, evaluators, folder, r)),
            0);
        read_results(found, name, "eval.jsonl", 2);
        shell("test $(wc -l <%s/as%zu/eval.jsonl) = 3", folder, r);
        for (int i = 0; i < NAMES; i++)
            if (found[i] != trained[i])
                fail_msg("%s: %s: %.9g, in training %.9g", runs[r], names[i], found[i], trained[i]);
    }
}

/* The disk is full, and results are only printed. */
TEST(test_nowhere)
{
    const char *const asked[] = {
        "--help",
        "--load_path=%s/run/latest --dry_run --device_memory=1 --device_train_microbatch_size=1",
        "--load_path=%s/run/latest --eval_only --device_eval_batch_size=2 %s --save_folder=null"
    };
    for (int i = SANITIZED ? 2 : 0; i < 3; i++) {
        char arguments[2048];
        snprintf(arguments, sizeof arguments, asked[i], folder, evaluators);
        shell("%s/train %s >/dev/null", setting("BUILD", "build/cpu"), arguments);
        shell("! %s/train %s >/dev/full 2>%s/full.log && grep -q '^error: stdout: cannot write' "
              "%s/full.log",
              setting("BUILD", "build/cpu"), arguments, folder, folder);
    }
}

TEST(test_refused)
{
    expect_status(train(1, "--eval_only %s --save_folder=null", evaluators), STATUS_INPUT);
    expect_output("eval_only: there is no model");
    expect_status(train(1,
                        "--eval_only --load_path=%s/run/latest --evaluators=[] --save_folder=null",
                        folder),
                  STATUS_INPUT);
    expect_output("there are no evaluators");
    shell("echo 'evaluators: []' >%s/only.yaml", folder);
    expect_status(finish(start_command("%s/train %s/only.yaml --eval_only",
                                       setting("BUILD", "build/cpu"), folder)),
                  STATUS_INPUT);
    expect_output("only.yaml: there is no model; --load_path=FOLDER names");
    shell("sed -i 's/\\[0, 0, 500\\]/[0, 0, 1000]/' %s/made.jsonl", folder);
    expect_status(
        train(1, "--max_duration=2 --eval_interval=2 %s --save_folder=%s/bad", evaluators, folder),
        STATUS_INPUT);
    expect_output("made.jsonl:2: token 1000 is beyond the vocabulary");
}

int main(void)
{
    return run_all_tests(make_evaluators, remove_folder);
}
