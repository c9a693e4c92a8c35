/* The training loop with steps that are not finite: what is saved, when it is published, and how
 * the run ends. The test starts train.c itself, with gradient norms set to infinity at given
 * steps. */
#include "tests/test.h"
#include "tests/launch.h"

#include "data/loader.h"
#include "kernels/runtime/comm.h"
#include "model/update/update.h"

static double norm_or_not(const ParamStore *store);
static bool wait_or_not(Loader *l, double seconds);

#define main train_main
#define train train_loop
#define optimizer_grad_norm norm_or_not
#define loader_wait wait_or_not
#include "train.c"
#undef main
#undef train
#undef optimizer_grad_norm
#undef loader_wait

/* LOST: steps of this process whose norm is not finite; < 0: a spike. ASKED: the step at whose end
 * a signal stops the run. */
static bool was_lost; /* whether the last step was lost */

static double norm_or_not(const ParamStore *store)
{
    static long step;
    step++;
    if (step == strtol(getenv("ASKED"), NULL, 10))
        raise(SIGUSR2);
    bool lost = false, spike = false;
    char *text = getenv("LOST"), *end;
    for (long n = strtol(text, &end, 10); end != text; n = strtol(text = end, &end, 10)) {
        lost |= n == step;
        spike |= n == -step;
    }
    const double norm = optimizer_grad_norm(store);
    was_lost = lost;
    return lost ? INFINITY : spike ? 1e9 : norm;
}

/* Data arrive late on one rank after a step that is not finite. */
static bool wait_or_not(Loader *l, double seconds)
{
    static int late = 3;
    return !(was_lost && comm_rank() == 1 && late-- > 0) && loader_wait(l, seconds);
}

static int run(const char *name, const char *lost, int asked, const char *more)
{
    return finish(start_command(
        "env LOST='%s' ASKED=%d %s -n 2 %s/tests/test_skips configs/tiny.yaml %s %s "
        "--model.d_model=16 "
        "--model.max_sequence_length=8 --max_duration=8 --save_interval=4 --save_folder=%s/%s %s",
        lost, asked, setting("LAUNCH", "mpirun --oversubscribe"), setting("BUILD", "build/cpu"),
        SMALL, ids, folder, name, more));
}

/* Returns the checkpoints of a run, each name followed by a blank. */
static void expect_checkpoints(const char *name, const char *expected)
{
    char found[1024], command[512];
    snprintf(command, sizeof command, "cd %s/%s && ls | grep ^step | tr '\n' ' '", folder, name);
    FILE *p = popen(command, "r");
    assert_non_null(p);
    found[fread(found, 1, sizeof found - 1, p)] = '\0';
    pclose(p);
    if (strcmp(found, expected) != 0) {
        fprintf(stderr, "%s\n", output);
        fail_msg("%s holds '%s', expected '%s'", name, found, expected);
    }
}

/* Runs that complete their 8 steps. */
TEST(test_passing)
{
    needs_ranks(2);
    static const struct {
        const char *name, *lost;
        int asked;
        const char *checkpoints, *said;
    } runs[] = {
        /* a checkpoint that is due at step 4 is saved at step 5 */
        { "due", "4", 0, "step5 step8 ", "SKIPPED" },
        /* a checkpoint is published when step 7 is finite */
        { "waits", "5 6", 0, "step4 step8 ", "SKIPPED" },
        /* no checkpoint at a step that is not finite */
        { "asked", "3 4", 2, "step5 ", "asked to stop at step 5" },
        /* stops, although the data of the next step are late */
        { "late", "5", 5, "step4 step6 ", "asked to stop at step 6" },
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        expect_status(run(runs[i].name, runs[i].lost, runs[i].asked, ""), 0);
        expect_output(runs[i].said);
        expect_checkpoints(runs[i].name, runs[i].checkpoints);
    }
}

/* Runs that end with steps that are not finite. */
TEST(test_ending)
{
    needs_ranks(2);
    static const struct {
        const char *name, *lost;
        int asked;
        const char *checkpoints, *said;
    } runs[] = {
        { "one", "8", 0, "step4 step8-aborted ", "step 8: the run ends with a step whose" },
        { "two", "7 8", 0, "step4 step8-aborted ", "step 8: the run ends with two steps whose" },
        { "three", "6 7 8", 0, "step4 step8-aborted ",
          "step4; the state at the end of the run is saved in " },
        { "unproven", "5 6 7", 0, "step7-aborted ", "there is no checkpoint in " },
        { "asked", "2 3 4", 1, "step4-aborted ", "the third step in a row" },
        { "late", "5 6 7", 5, "step7-aborted ", "there is no checkpoint in " },
    };
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "ends-%s", runs[i].name);
        if (run(name, runs[i].lost, runs[i].asked, "") == 0)
            fail_msg("%s ended as if all were well", name);
        expect_output(runs[i].said);
        expect_checkpoints(name, runs[i].checkpoints);
    }
    /* a resume uses the published checkpoint, and not the state that was set aside */
    expect_status(run("ends-three", "", 0, "--try_load_latest_save"), 0);
    expect_output("ends-three/step4, at step 4");
    expect_checkpoints("ends-three", "step4 step8 step8-aborted ");
    assert_int_not_equal(run("nothing", "5 6 7", 0, "--save_num_checkpoints_to_keep=0"), 0);
    expect_checkpoints("nothing", "");
}

/* The loss of a spike is finite, so it confirms the save of the step before. This save must not be
 * dropped. */
TEST(test_spike_after_save)
{
    needs_ranks(2);
    assert_int_not_equal(
        run("spike", "-66", 0, "--max_duration=70 --save_interval=65 --spikes=stop"), 0);
    expect_output("step 66: a spike ends the run");
    expect_checkpoints("spike", "step65 step65-aborted ");
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return train_main(argc, argv);
    return run_all_tests(make_folder, remove_folder);
}
