/* Data that become unreadable during a run: the run saves the trained state and ends. An evaluation
 * skips data that are missing. */
#include "tests/test.h"
#include "tests/launch.h"

static const char evaluators[] =
    "--eval_subset_num_batches=4 --evaluators='[{label: a, data: {paths: [%1$s/a.npy]}}, "
    "{label: b, data: {paths: [%1$s/b.npy]}}, "
    "{label: q, type: downstream, data: {paths: [%1$s/q.jsonl]}}]'";

/* Copies the training tokens, with one token outside of the vocabulary, which step 4 reads. */
static void make_bad(void)
{
    shell("cp build/few-ids/train.npy %s/bad.npy && printf '\\377\\377' | dd of=%s/bad.npy "
          "conv=notrunc bs=1 seek=%d 2>/dev/null",
          folder, folder, 20000);
}

static int train_on(int ranks, const char *data, const char *more)
{
    return train(ranks,
                 "--max_duration=60 --stop_at=40 --save_folder=%s/run --data.paths=[%s/%s] %s",
                 folder, folder, data, more);
}

/* The state after the last trained step is saved. A resume from it equals an undisturbed run bit
 * for bit. */
TEST(test_bad_token)
{
    double whole[MAX_STEPS], found[MAX_STEPS];
    make_bad();
    for (int ranks = 1; ranks <= 2 && ranks <= most_ranks(); ranks++) {
        long step = 0;
        expect_status(train_on(ranks, "bad.npy", ""), STATUS_INPUT);
        const char *error = strstr(output, "; step ");
        if (!error ||
            sscanf(error, "; step %ld has no data, and the last checkpoint is ", &step) != 1)
            fail_msg("no step in the error: %s", output);
        assert_in_range(step, 2, 39);
        expect_output(
            "bad.npy: token 10000 (counted from 0) is 65535, but the vocabulary has 1000 ids");
        assert_int_equal(trainer("run/latest", "step"), step - 1);
        losses(found, "run", (int)step - 1);
        /* no new state to save */
        expect_status(train_on(ranks, "bad.npy", "--try_load_latest_save"), STATUS_INPUT);
        assert_int_equal(trainer("run/latest", "step"), step - 1);
        shell("mv %s/bad.npy %s/other && cp build/few-ids/train.npy %s/bad.npy", folder, folder,
              folder);
        expect_status(train_on(ranks, "bad.npy", "--try_load_latest_save"), 0);
        losses(found, "run", 40);
        expect_status(train(ranks,
                            "--max_duration=60 --stop_at=40 --save_folder=%s/whole "
                            "--data.paths=[build/few-ids/train.npy]",
                            folder),
                      0);
        losses(whole, "whole", 40);
        for (int i = 1; i <= 40; i++)
            assert_true(found[i] == whole[i]);
        shell("cd %s && rm -r run whole && mv other bad.npy", folder);
    }
}

/* Waits until a run has written this many lines of metrics. */
static void wait_for_lines(const char *run, int lines)
{
    char command[512];
    snprintf(command, sizeof command,
             "test $(2>/dev/null wc -l <%s/%s/metrics.jsonl || echo 0) -ge %d", folder, run, lines);
    for (int i = 0; i < 1000 && system(command) != 0; i++)
        usleep(50000);
}

/* A file is truncated while it is read, and the kernel sends a signal. */
TEST(test_cut_file)
{
    char arguments[1024];
    shell("cp build/few-ids/train.npy %s/cut.npy", folder);
    snprintf(arguments, sizeof arguments,
             "--max_duration=100000 --save_folder=%s/cut --data.paths=[%s/cut.npy]", folder,
             folder);
    FILE *p = start(2, arguments);
    wait_for_lines("cut", 3);
    shell("truncate -s 4096 %s/cut.npy", folder);
    expect_status(finish(p), STATUS_INPUT);
    expect_output("cut.npy can no longer be read at byte");
    expect_output("has no data, and the last checkpoint is ");
    shell("cd %s/cut && test step$(tail -n 1 metrics.jsonl | sed 's/.*\"step\": "
          "\\([0-9]*\\).*/\\1/') = "
          "$(readlink latest)",
          folder);
}

/* ---- evaluations ----------------------------------------------------------------------------- */

static void make_evaluators(void)
{
    shell(
        "cp build/few-ids/val.npy %s/a.npy && cp build/few-ids/val.npy %s/b.npy && "
        "printf '%%s\\n' '{\"task\": \"q\", \"metric\": \"acc\", \"questions\": 1}' '{\"gold\": 0, "
        "\"choices\": ["
        "{\"tokens\": [1, 2], \"continuation\": 1, \"characters\": 1, \"bytes\": 1}, "
        "{\"tokens\": [1, 3], \"continuation\": 1, \"characters\": 1, \"bytes\": 1}]}' >%s/q.jsonl",
        folder, folder, folder);
}

/* Starts a run whose evaluators read these files. */
static FILE *start_evaluating(int ranks, const char *run, const char *more)
{
    char with[1024], all[2048];
    snprintf(with, sizeof with, evaluators, folder);
    snprintf(all, sizeof all, "%s --save_folder=%s/%s %s", with, folder, run, more);
    return start(ranks, all);
}

/* Returns the number of lines in a run's metrics with `name` at this step; step 0: at any step. */
static int results(const char *run, const char *name, int step)
{
    char path[256], line[8192], begin[32];
    int found = 0;
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    snprintf(begin, sizeof begin, "{\"step\": %d,", step);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        found += strstr(line, name) && (step == 0 || strncmp(line, begin, strlen(begin)) == 0);
    if (f)
        fclose(f);
    return found;
}

enum { STEPS = 300, EVALUATIONS = 30 };
static const char long_run[] =
    "--max_duration=300 --eval_interval=10 --console_log_interval=100 --try_load_latest_save";

/* Changes files of `a` and `q` after the first evaluation of all three sets. */
static void check_faults(int ranks, const char *fault_a, const char *fault_q)
{
    make_evaluators();
    FILE *p = start_evaluating(ranks, "eval", long_run);
    for (int i = 0; i < 2000 && results("eval", "eval/downstream/q_acc", 0) == 0; i++)
        usleep(10000);
    shell("cd %s && %s && %s", folder, fault_a, fault_q);
    expect_status(finish(p), 0);
    expect_output("warning: step 300: no evaluation 'a': ");
    expect_output("warning: step 300: no evaluation 'q': ");
    assert_int_equal(trainer("eval/latest", "step"), STEPS);
    assert_int_equal(results("eval", "train/CrossEntropyLoss", 0), STEPS);
    assert_int_equal(results("eval", "eval/b/CrossEntropyLoss", 0), EVALUATIONS);
    assert_in_range(results("eval", "eval/a/CrossEntropyLoss", 0), 1, EVALUATIONS - 1);
    assert_in_range(results("eval", "eval/downstream/q_acc", 0), 1, EVALUATIONS - 1);
    /* the next process repeats the missing evaluations of the last step, once */
    make_evaluators();
    for (int i = 0; i < 2; i++) {
        expect_status(finish(start_evaluating(ranks, "eval", long_run)), 0);
        assert_int_equal(results("eval", "eval/a/CrossEntropyLoss", STEPS), 1);
        assert_int_equal(results("eval", "eval/b/CrossEntropyLoss", STEPS), 1);
        assert_int_equal(results("eval", "eval/downstream/q_acc", STEPS), 1);
    }
    shell("rm -r %s/eval", folder);
}

TEST(test_evaluations_fail)
{
    check_faults(1, "rm a.npy", "rm q.jsonl");
    check_faults(most_ranks() > 1 ? 2 : 1, "truncate -s 1 a.npy",
                 "sed -i 's/gold\": 0/gold\": 9/' q.jsonl");
}

/* A token outside of the vocabulary deep in the validation data is an error with --eval_only. */
TEST(test_bad_validation)
{
    make_evaluators();
    shell("printf '\\377\\377' | dd of=%s/a.npy conv=notrunc bs=1 seek=3000 2>/dev/null", folder);
    expect_status(
        finish(start_evaluating(2, "deep",
                                "--max_duration=2 --eval_interval=1 --eval_subset_num_batches=-1")),
        0);
    expect_output("no evaluation 'a': ");
    expect_output("a.npy: token 1500 (counted from 0) is 65535");
    assert_int_equal(results("deep", "eval/a/", 0), 0);
    assert_int_equal(results("deep", "eval/b/CrossEntropyLoss", 0), 2);
    char load[256];
    snprintf(load, sizeof load,
             "--eval_only --eval_subset_num_batches=-1 --load_path=%s/deep/latest", folder);
    expect_status(finish(start_evaluating(2, "only", load)), STATUS_INPUT);
    expect_output("a.npy: token 1500 (counted from 0) is 65535");
}

/* Runs the same command again: evaluations before the first step are logged once. */
TEST(test_on_load)
{
    static const char run[] =
        "--max_duration=4 --stop_at=2 --save_interval=2 --eval_on_load --try_load_latest_save";
    make_evaluators();
    for (int i = 0; i < 3; i++) {
        expect_status(finish(start_evaluating(1, "load", run)), 0);
        /* at steps 0 and 2 */
        assert_int_equal(results("load", "eval/a/CrossEntropyLoss", 0), i == 0 ? 1 : 2);
        assert_int_equal(results("load", "eval/downstream/q_acc", 2), i == 0 ? 0 : 1);
    }
    /* the log is cut off before this evaluation */
    shell("sed -i '/\"step\": 2,.*eval.a/d' %s/load/metrics.jsonl", folder);
    expect_status(finish(start_evaluating(1, "load", run)), 0);
    assert_int_equal(results("load", "eval/a/CrossEntropyLoss", 2), 1);
    assert_int_equal(results("load", "eval/b/CrossEntropyLoss", 2), 1);
    expect_status(finish(start_evaluating(
                      1, "load", "--max_duration=4 --stop_at=2 --eval_on_load --save_overwrite")),
                  0);
    assert_int_equal(results("load", "eval/a/CrossEntropyLoss", 0), 1);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
