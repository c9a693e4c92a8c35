/* Ranks that are killed, stopped, hang or have an error: all ranks must end, a message must name
 * the rank and its operation, and a resume from the last complete checkpoint must equal an
 * undisturbed run. */
#include "kernels/runtime/clock.h"
#include "tests/test.h"
#include "tests/launch.h"
#include "tests/sanitized.h"

#include <dirent.h>
#include <limits.h>
#include <signal.h>
#include <sys/stat.h>

/* MOST: seconds from a fault to the end of all ranks, on a busy machine */
enum { STEPS = 8, MOST = SANITIZED ? 300 : 60 };

/* Longer than any operation of a healthy run on a busy machine: a device takes seconds to start. */
static int timeout_seconds(void)
{
    return on_gpu() || SANITIZED ? 20 : 3;
}

/* ---- the processes of a run ------------------------------------------------------------------ */

/* Reads a file of /proc, with a NUL after each entry and two at the end; empty if the process is
 * gone. */
static size_t read_proc(char *text, size_t size, const char *pid, const char *name)
{
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    memset(text, 0, size);
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    size_t n = fread(text, 1, size - 2, f);
    fclose(f);
    return n;
}

static bool has_entry(const char *text, size_t n, const char *entry)
{
    for (const char *s = text; s < text + n; s += strlen(s) + 1)
        if (strcmp(s, entry) == 0)
            return true;
    return false;
}

/* Returns the process of a rank of the run that saves in folder/run; 0: there is none (yet). */
static pid_t find_rank(const char *run, int rank)
{
    static char text[1 << 16];
    char save_folder[512], number[64];
    snprintf(save_folder, sizeof save_folder, "--save_folder=%s/%s", folder, run);
    snprintf(number, sizeof number, "OMPI_COMM_WORLD_RANK=%d", rank);
    pid_t found = 0;
    DIR *dir = opendir("/proc");
    assert_non_null(dir);
    for (struct dirent *e; !found && (e = readdir(dir));) {
        const char *pid = e->d_name;
        if (*pid >= '0' && *pid <= '9' &&
            has_entry(text, read_proc(text, sizeof text, pid, "cmdline"), save_folder) &&
            has_entry(text, read_proc(text, sizeof text, pid, "environ"), number))
            found = (pid_t)strtol(pid, NULL, 10);
    }
    closedir(dir);
    return found;
}

static void signal_rank(const char *run, int rank, int number)
{
    pid_t pid = find_rank(run, rank);
    if (pid == 0 || kill(pid, number) != 0)
        fail_msg("%s: no process of rank %d to signal", run, rank);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static int count_lines(const char *run)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", folder, run);
    FILE *f = fopen(path, "r");
    int lines = 0;
    for (int c; f && (c = fgetc(f)) != EOF;)
        lines += c == '\n';
    if (f)
        fclose(f);
    return lines;
}

static void wait_for_steps(FILE *p, const char *run, int steps)
{
    for (int i = 0; count_lines(run) < steps; i++) {
        if (i == 6000) {
            for (int rank = 0; rank < most_ranks(); rank++)
                if (find_rank(run, rank))
                    signal_rank(run, rank, SIGKILL);
            finish(p);
            fprintf(stderr, "%s\n", output);
            fail_msg("%s: no step %d after a minute", run, steps);
        }
        usleep(10000);
    }
}

/* Returns the highest N of all step<N>.tmp; 0: there is none. */
static long unfinished_save(const char *run)
{
    char path[512], *end;
    snprintf(path, sizeof path, "%s/%s", folder, run);
    DIR *dir = opendir(path);
    long most = 0;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (strncmp(e->d_name, "step", 4) != 0)
            continue;
        long step = strtol(e->d_name + 4, &end, 10);
        if (strcmp(end, ".tmp") == 0 && step > most)
            most = step;
    }
    if (dir)
        closedir(dir);
    return most;
}

static void wait_for_save(const char *run, long from)
{
    double start = clock_seconds();
    while (unfinished_save(run) < from) {
        if (clock_seconds() - start > 60)
            fail_msg("%s: no save of step %ld or later in a minute", run, from);
        usleep(100);
    }
}

/* The run must end by itself, soon after `since`, with a status that is not 0. */
static void expect_end(FILE *run, double since)
{
    int status = finish(run);
    double took = clock_seconds() - since;
    if (status == 0 || took > MOST) {
        fprintf(stderr, "%s\n", output);
        fail_msg("status %d after %.1f s, expected another than 0 within %d s", status, took, MOST);
    }
    printf("ended with status %d %.1f s after the fault\n", status, took);
}

static void expect_once(const char *text)
{
    expect_output(text);
    if (strstr(strstr(output, text) + 1, text)) {
        fprintf(stderr, "%s\n", output);
        fail_msg("said twice: '%s'", text);
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static const char TINY[] = "--model.d_model=16 --model.max_sequence_length=8";

static FILE *start_run(int ranks, const char *run, const char *more)
{
    char arguments[1024];
    snprintf(arguments, sizeof arguments,
             "%s --max_duration=%d --try_load_latest_save %s --save_folder=%s/%s", TINY, STEPS,
             more, folder, run);
    return start(ranks, arguments);
}

/* Resumes `run` to its end. Its losses must equal those of an undisturbed run. */
static void expect_same_losses(const char *run, const char *more)
{
    static double whole[MAX_STEPS];
    static bool known = false;
    double parts[MAX_STEPS];
    if (!known) {
        expect_status(finish(start_run(2, "whole", "--save_interval=null")), 0);
        losses(whole, "whole", STEPS);
        known = true;
    }
    expect_status(finish(start_run(2, run, more)), 0);
    losses(parts, run, STEPS);
    for (int i = 1; i <= STEPS; i++)
        if (whole[i] != parts[i])
            fail_msg("%s: step %d: loss %.17g, of a run without faults %.17g", run, i, parts[i],
                     whole[i]);
}

TEST(test_kill_in_a_step)
{
    needs_ranks(2);
    FILE *p = start_run(2, "kill", "--save_interval=2");
    wait_for_steps(p, "kill", 3);
    double since = clock_seconds();
    signal_rank("kill", 1, SIGKILL);
    expect_end(p, since);
    expect_once("rank 1 (process");
    expect_output("ended without a message");
    expect_output(" in step ");
    expect_same_losses("kill", "--save_interval=2");
}

/* One rank is killed while a checkpoint is written; in the next run, all ranks are killed. Rank 1
 * is stopped before, so that the other ranks cannot complete the save without it. */
TEST(test_kill_in_a_save)
{
    int interrupted = 0;
    needs_ranks(2);
    for (int i = 0; i < 2; i++) {
        FILE *p = start_run(2, "save", "--save_interval=1");
        wait_for_save("save", 2 + 2 * i);
        signal_rank("save", 1, SIGSTOP);
        double since = clock_seconds();
        if (i == 1)
            signal_rank("save", 0, SIGKILL);
        signal_rank("save", 1, SIGKILL);
        expect_end(p, since);
        interrupted += unfinished_save("save") > 0;
    }
    if (interrupted == 0)
        fail_msg("no kill came during a save");
    printf("%d of 2 came during a save\n", interrupted);
    expect_same_losses("save", "--save_interval=1");
    assert_int_equal(unfinished_save("save"), 0);
}

TEST(test_stop)
{
    needs_ranks(2);
    char arguments[128];
    snprintf(arguments, sizeof arguments,
             "--save_interval=null --max_duration=20000 --timeout_seconds=%d", timeout_seconds());
    FILE *p = start_run(4, "stop", arguments);
    wait_for_steps(p, "stop", 2);
    double since = clock_seconds();
    signal_rank("stop", 1, SIGSTOP);
    expect_end(p, since);
    expect_once("has not responded");
    expect_output("rank 1 (process");
    expect_output(" in step ");
    assert_int_equal(find_rank("stop", 1), 0);
}

/* Makes a working folder for one rank, with configurations and data. */
static void make_home(char *path, const char *name)
{
    char here[PATH_MAX], command[4 * PATH_MAX];
    assert_non_null(getcwd(here, sizeof here));
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    snprintf(command, sizeof command,
             "mkdir -p %s/data && ln -s %s/configs %s/ && ln -s %s/data/*.npy %s/data/", path, here,
             path, here, path);
    assert_int_equal(system(command), 0);
}

/* Starts two ranks, each in its own folder. */
static FILE *start_apart(const char *first, const char *second, const char *arguments)
{
    char program[PATH_MAX], train[PATH_MAX + 2048];
    assert_non_null(realpath(setting("BUILD", "build/cpu"), program));
    snprintf(train, sizeof train, "%s/train configs/tiny.yaml %s %s --timeout_seconds=%d %s",
             program, SMALL, TINY, timeout_seconds(), arguments);
    return start_command("%s -n 1 --wdir %s %s : -n 1 --wdir %s %s",
                         setting("LAUNCH", "mpirun --oversubscribe"), first, train, second, train);
}

/* Opening a pipe waits for a writer. So no file that a run reads may be a pipe. */
TEST(test_pipes)
{
    static const char *const names[] = { "tokenizer.json", "config.json", "trainer.json",
                                         "model.safetensors" };
    char arguments[1024], command[512];
    expect_status(train(1, "%s --max_duration=1 --save_folder=%s/pipes", TINY, folder), 0);
    snprintf(command, sizeof command, "mkfifo %s/pipe", folder);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i <= sizeof names / sizeof names[0]; i++) {
        const char *name = i > 0 ? names[i - 1] : "--data.paths";
        if (i == 0)
            snprintf(arguments, sizeof arguments, "--data.paths=[%s/pipe]", folder);
        else {
            snprintf(arguments, sizeof arguments, "--load_path=%s/broken", folder);
            snprintf(
                command, sizeof command,
                "cd %s && rm -rf broken && cp -r pipes/step1 broken && cd broken && rm -f %s %s && "
                "mkfifo %s",
                folder, name, i == 4 ? "trainer.json optimizer*" : "", name);
            assert_int_equal(system(command), 0);
        }
        FILE *p = start_run(1, "piped", arguments);
        expect_end(p, clock_seconds());
        snprintf(command, sizeof command,
                 i ? "broken/%s: is a pipe, expected a regular file" : "pipe is not a regular file",
                 name);
        expect_once(command);
    }
}

/* A rank that does not see rank 0's save_folder: a single rank has the error, before the first
 * step. */
TEST(test_error_of_one_rank)
{
    char first[PATH_MAX], second[PATH_MAX];
    needs_ranks(2);
    make_home(first, "first");
    make_home(second, "second");
    FILE *p = start_apart(first, second, "--max_duration=4 --save_interval=2 --save_folder=run");
    expect_end(p, clock_seconds());
    expect_once("error (rank 1): save_folder run of rank 1 on ");
    assert_null(strstr(output, "step 1/4"));
    for (int i = 0; i < 2; i++) { /* both folders are empty */
        char command[PATH_MAX + 64];
        snprintf(command, sizeof command, "test -z \"$(ls -A %s/run)\"", i ? second : first);
        assert_int_equal(system(command), 0);
    }
    assert_null(strstr(output, "ended without a message"));
}

/* Two ranks have different files, so the run does not start. */
static void differ_case(const char *name, const char *change, const char *message)
{
    char home[PATH_MAX], command[2 * PATH_MAX], arguments[512];
    make_home(home, name);
    snprintf(command, sizeof command, "cd %.4000s && %s", home, change);
    assert_int_equal(system(command), 0);
    snprintf(arguments, sizeof arguments, "--max_duration=4 --save_folder=%s/%s-run", folder, name);
    FILE *p = start_apart(".", home, arguments);
    expect_end(p, clock_seconds());
    expect_once(message);
    snprintf(command, sizeof command, "test ! -e %s/%s-run/metrics.jsonl", folder, name);
    assert_int_equal(system(command), 0);
}

TEST(test_ranks_differ)
{
    needs_ranks(2);
    differ_case("seed",
                "cp -rL configs copy && rm configs && mv copy configs && sed -i 's/^seed:.*/seed: "
                "1/' configs/tiny.yaml",
                "the ranks have different configurations");
    differ_case("files",
                "mv data/sample-val.npy data/sample-train.npy && cp data/sample-train.npy "
                "data/sample-val.npy",
                "the ranks have different data files");
}

/* Each rank has its own save_folder, and only one of the folders has a checkpoint. */
TEST(test_checkpoints_differ)
{
    char first[PATH_MAX], second[PATH_MAX];
    needs_ranks(2);
    make_home(first, "has");
    make_home(second, "lacks");
    expect_status(train(1, "%s --max_duration=2 --save_folder=%s/run", TINY, first), 0);
    FILE *p =
        start_apart(first, second, "--max_duration=4 --save_folder=run --try_load_latest_save");
    expect_end(p, clock_seconds());
    expect_once("the ranks have different checkpoints to continue");

    /* both have the checkpoint, but with different windows of spikes: the ranks would not skip the
     * same steps */
    char command[4 * PATH_MAX], arguments[PATH_MAX];
    snprintf(command, sizeof command,
             "cp -r %s/run %s && sed -i 's/\"loss\": \".*\"/\"loss\": \"1 2\"/' "
             "%s/run/step2/trainer.json",
             first, second, second);
    assert_int_equal(system(command), 0);
    snprintf(arguments, sizeof arguments,
             "--max_duration=4 --load_path=run/step2 --save_folder=%s/both", folder);
    p = start_apart(first, second, arguments);
    expect_end(p, clock_seconds());
    expect_once("the ranks have different trainer.json in run/step2");
}

/* Missing validation files are reported before the first step. The message says how to run without
 * them. */
TEST(test_no_validation_file)
{
    FILE *p =
        start_run(1, "blind",
                  "--eval_interval=2 --evaluators='[{label: far, data: {paths: [nowhere.npy]}}]'");
    expect_end(p, clock_seconds());
    expect_once("evaluator 'far' (--evaluators=[] trains without): cannot open nowhere.npy");
}

int main(void)
{
    ids = ""; /* slower steps, so that a kill hits a step or a save */
    return run_all_tests(make_folder, remove_folder);
}
