/* Signals at which a run saves and ends, signals that it ignores, and limits of the system. */
#include "tests/test.h"
#include "tests/launch.h"

/* Sends a signal to the ranks whose save_folder is `path`, or to their launcher. Returns 0 if it
 * found any. NOTE: the launcher is the parent of the ranks; its own name may be mpirun.real,
 * orterun or prterun. */
static int send_signal(const char *name, bool to_launcher, const char *path)
{
    char command[1024];
    snprintf(command, sizeof command,
             "last=; for p in /proc/[0-9]*; do case $(2>/dev/null tr '\\0' ' ' <$p/cmdline) in "
             "%s/train\\ *save_folder=%s\\ *) to=$(sed -n 's/^%s:[^0-9]*//p' $p/status); "
             "test \"$to\" = \"$last\" || kill -%s $to; last=$to ;; esac; done; test -n \"$last\"",
             setting("BUILD", "build/cpu"), path, to_launcher ? "PPid" : "Pid", name);
    return system(command);
}

/* Waits until this shell command succeeds, at most 100 seconds. */
static void wait_until(const char *condition)
{
    for (int i = 0; i < 1000 && system(condition) != 0; i++)
        usleep(100000);
}

/* Stops a run of this save_folder by a signal as soon as it has logged step 1. */
static void stop_at_first_step(const char *path, const char *arguments)
{
    char command[1024];
    FILE *p = start(2, arguments);
    snprintf(command, sizeof command, "test -s %s/metrics.jsonl", path);
    wait_until(command);
    assert_int_equal(send_signal("USR1", false, path), 0);
    expect_status(finish(p), 0);
    expect_output("asked to stop at step 1");
}

/* All steps run only if the signal is lost. There are many steps, because a GPU computes thousands
 * of them while send_signal looks for the process. */
static void check_signal(const char *name, bool to_launcher)
{
    char path[256], command[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(
        command, sizeof command,
        "--max_duration=1000000 --save_interval=null --console_log_interval=100 --save_folder=%s",
        path);
    FILE *p = start(2, command);
    snprintf(command, sizeof command, "test $(2>/dev/null wc -l <%s/metrics.jsonl || echo 0) -ge 3",
             path);
    wait_until(command);
    int signalled = send_signal(name, to_launcher, path);
    expect_status(finish(p), 0);
    assert_int_equal(signalled, 0);
    expect_output("asked to stop at step");
    snprintf(command, sizeof command, "test -f %s/latest/trainer.json", path);
    assert_int_equal(system(command), 0);
}

/* The ranks get SIGTERM or SIGUSR1, as from a batch system. mpirun itself would kill the ranks a
 * second after its own SIGTERM. mpirun forwards SIGUSR2. NOTE: mpirun also forwards SIGUSR1, unless
 * LLVM handles SIGUSR1 itself; OpenCL drivers load LLVM into mpirun through hwloc. */
TEST(test_signals)
{
    check_signal("TERM", false);
    check_signal("USR1", false);
    check_signal("USR2", true);
}

/* Starts a single process without a launcher, and sends it these signals, each after three more
 * steps. The last signal stops the run; it ignores the others. */
static void check_alone(const char *name, const char *through, const char *const *signals)
{
    char path[256], command[1024];
    snprintf(path, sizeof path, "%s/alone-%s", folder, name);
    FILE *p = start_command(
        "%s %s/train configs/tiny.yaml %s %s --max_duration=1000000 --save_interval=null "
        "--console_log_interval=100 --save_folder=%s ",
        through, setting("BUILD", "build/cpu"), SMALL, ids, path);
    snprintf(
        command, sizeof command,
        "test $(cat %s/metrics.jsonl 2>&- | wc -l) -ge $((3 + $(cat %s-lines 2>&- || echo 0)))",
        path, path);
    for (int i = 0; signals[i]; i++) {
        wait_until(command);
        assert_int_equal(send_signal(signals[i], false, path), 0);
        shell("wc -l <%s/metrics.jsonl >%s-lines", path, path);
    }
    expect_status(finish(p), 0);
    expect_output("asked to stop at step");
    shell("test -f %s/latest/trainer.json", path);
}

/* Without mpirun: the end of a terminal, Ctrl-C, and a limit of processor time. Under nohup, SIGHUP
 * is ignored. */
TEST(test_signals_alone)
{
    static const char *const stopping[] = { "TERM", "HUP", "INT", "USR1", "USR2", "XCPU" };
    for (size_t i = 0; i < sizeof stopping / sizeof *stopping; i++)
        check_alone(stopping[i], "", (const char *const[]){ stopping[i], NULL });
    check_alone("nohup", "nohup", (const char *const[]){ "HUP", "HUP", "TERM", NULL });
}

/* The reader of stdout ends after a few lines. The run saves, and says so on stderr. */
TEST(test_stdout_ends)
{
    shell("{ timeout 300 %s/train configs/tiny.yaml %s %s --max_duration=1000000 "
          "--save_interval=null "
          "--save_folder=%s/head 2>%s/said; "
          "echo $? >%s/status; } | head -n 12 >%s/first",
          setting("BUILD", "build/cpu"), SMALL, FEW_IDS, folder, folder, folder, folder);
    shell("cd %s && test $(cat status) = 0 && test $(wc -l <first) = 12 && test -f "
          "head/latest/trainer.json && "
          "grep -q 'nothing reads stdout any more (SIGPIPE): the run stops at step' said",
          folder);
}

/* A file may not exceed ulimit -f, here 8 MiB, and the moments need more: the error names the
 * file. */
TEST(test_file_limit)
{
    const int status = finish(start_command(
        "sh -c \"ulimit -f 16384; exec %s/train configs/tiny.yaml %s --max_duration=1 "
        "--save_folder=%s/limited\"",
        setting("BUILD", "build/cpu"), SMALL, folder));
    expect_status(status, 1);
    expect_output("File too large");
    expect_output("limited/step1.tmp/");
    assert_false(exists("limited/latest"));
}

/* A run stops even during an evaluation of minutes. */
TEST(test_signal_in_evaluation)
{
    char path[256], command[1024], data[20 * 25] = "build/few-ids/train.npy";
    for (int i = 1; i < 20; i++)
        strcat(data, ",build/few-ids/train.npy");
    snprintf(path, sizeof path, "%s/evaluates", folder);
    snprintf(command, sizeof command,
             "--max_duration=100 --eval_interval=1 --save_folder=%s "
             "--evaluators='[{label: val, data: {paths: [%s]}}]'",
             path, data);
    stop_at_first_step(path, command);
    assert_null(strstr(output, "eval at step"));
    assert_int_equal(trainer("evaluates/latest", "step"), 1);
    /* the next process repeats the evaluation, once */
    for (int i = 0; i < 2; i++) {
        expect_status(train(2,
                            "--max_duration=100 --stop_at=1 --eval_interval=1 "
                            "--try_load_latest_save --save_folder=%s",
                            path),
                      0);
        assert_int_equal(strstr(output, "eval at step 1 ") != NULL, i == 0);
    }
}

/* The same for samples of many texts before the next step. */
TEST(test_signal_in_samples)
{
    char path[256], command[1024];
    snprintf(path, sizeof path, "%s/prompts.jsonl", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 4000; i++)
        fputs("[1]\n", f);
    assert_int_equal(fclose(f), 0);
    snprintf(path, sizeof path, "%s/samples", folder);
    snprintf(command, sizeof command,
             "--max_duration=100 --save_folder=%s --samples.prompts=%s/prompts.jsonl "
             "--samples.interval=1",
             path, folder);
    stop_at_first_step(path, command);
    assert_null(strstr(output, "sample 0:"));
    assert_int_equal(trainer("samples/latest", "step"), 1);
    /* the next process makes the missing samples, once */
    for (int i = 0; i < 2; i++) {
        expect_status(train(2,
                            "--max_duration=100 --stop_at=1 --try_load_latest_save "
                            "--save_folder=%s --samples.max_new_tokens=1 "
                            "--samples.prompts=%s/prompts.jsonl --samples.interval=1",
                            path, folder),
                      0);
        assert_int_equal(strstr(output, "sample 0:") != NULL, i == 0);
    }
}

/* Ctrl-C twice. One step of 5000 sequences takes longer than the test can wait. */
TEST(test_second_signal)
{
    char path[256], command[512];
    ids = "";
    snprintf(path, sizeof path, "%s/twice", folder);
    snprintf(command, sizeof command,
             "--max_duration=1 --global_train_batch_size=5000 --save_folder=%s", path);
    FILE *p = start(1, command);
    ids = FEW_IDS;
    snprintf(command, sizeof command, "test -f %s/config.yaml", path);
    wait_until(command);
    usleep(500000); /* the step begins */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(send_signal("INT", false, path), 0);
        usleep(300000);
    }
    assert_int_not_equal(finish(p), 0);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
