/* Extended WSD runs have the same losses as a run that was longer from the start, and rates by the
 * formula of the decay. Also refusals, and the rates of all schedules when a run becomes longer. */
#include "tests/test.h"
#include "tests/launch.h"

#define WSD \
    "--scheduler.name=wsd --scheduler.t_decay=4 --optimizer.learning_rate=1e-3 " \
    "--save_num_checkpoints_to_keep=-1 " \
    "--save_interval=4 "

static int run(int ranks, const char *name, const char *more)
{
    return train(ranks, WSD "--save_folder=%s/%s %s", folder, name, more);
}

static const char *from(const char *run, const char *more)
{
    static char text[512];
    snprintf(text, sizeof text, "--extend=%s/%s %s", folder, run, more);
    return text;
}

static void check_same(const char *a, const char *b, int first, int last)
{
    double x[MAX_STEPS], y[MAX_STEPS];
    metric(x, a, "train/CrossEntropyLoss");
    metric(y, b, "train/CrossEntropyLoss");
    for (int i = first; i <= last; i++)
        if (!(x[i] == y[i]))
            fail_msg("step %d: loss %.9g in %s, %.9g in %s", i, x[i], a, y[i], b);
}

/* Returns the rates from step `first` on: 1e-3 after two steps of warmup, and 1e-3 (0.1 + 0.9 left
 * / 4) in the last four steps. */
static void check_rates(const char *run, int first, int last)
{
    double rate[MAX_STEPS];
    assert_int_equal(metric(rate, run, "optim/learning_rate_group0"), last - first + 1);
    for (int i = first; i <= last; i++) {
        const double part = i < 2          ? i / 2.0
                            : last - i < 4 ? (last - i) / 4.0
                                           : 1,
                     expected = 1e-3 * (0.1 + 0.9 * part);
        if (!(fabs(rate[i] - expected) <= 1e-9 * expected))
            fail_msg("%s, step %d: rate %.12g, expected %.12g", run, i, rate[i], expected);
    }
}

/* The decay of `short` begins after step 12, at which there is a checkpoint. */
TEST(test_goes_on)
{
    expect_status(run(1, "long", "--max_duration=24"), 0);
    expect_status(run(1, "short", "--max_duration=16"), 0);
    expect_status(run(1, "extended", from("short", "--max_duration=24")), 0);
    expect_output("short/step12, at step 12 of 24");
    check_same("long", "extended", 13, 24);
    check_rates("extended", 13, 24);
    shell("cmp %s/long/step24/model.safetensors %s/extended/step24/model.safetensors", folder,
          folder);
    assert_true(exists("short/step16"));
    shell("sed -n 's/^load_path: //p' %s/extended/config.yaml | grep -q short/step12", folder);
    /* the same command after an interruption: checkpoints of its own folder come first */
    expect_status(run(1, "halves", from("short", "--max_duration=24 --stop_at=18")), 0);
    expect_status(run(2, "halves", from("short", "--max_duration=24 --try_load_latest_save")), 0);
    expect_output("halves/step18, at step 18 of 24");
    check_same("long", "halves", 13, 18);
}

/* A decay can start from any checkpoint, also while the run is not over. Afterwards the stable
 * phase continues from there. */
TEST(test_branches)
{
    expect_status(run(1, "branch", from("long/step8", "--max_duration=12")), 0);
    check_rates("branch", 9, 12);
    expect_status(run(1, "again", from("branch", "--max_duration=12")), STATUS_INPUT);
    expect_output("all its checkpoints, step12 to step12, are in the decay, which begins after 8 "
                  "of 12 steps");
    expect_status(run(1, "tokens",
                      "--scheduler.units=tokens --scheduler.t_decay=1024 --max_duration=4096T "
                      "--scheduler.t_warmup=512"),
                  0);
    expect_status(
        run(1, "tokens-on",
            from("tokens", "--scheduler.units=tokens --scheduler.t_decay=1024 --max_duration=5120T "
                           "--scheduler.t_warmup=512")),
        0);
    expect_output("tokens/step12, at step 12 of 20");
    check_rates("tokens-on", 13, 20);
    /* Four steps of 128 tokens, then steps of 256: 3584 tokens, whose decay begins at token 2304,
     * in step 11. */
    const char *const warm = "--scheduler.units=tokens --scheduler.t_decay=1280 "
                             "--batch_size_warmup=[4] --scheduler.t_warmup=512 ";
    char text[256];
    snprintf(text, sizeof text, "%s--max_duration=16", warm);
    expect_status(run(1, "warm", text), 0);
    snprintf(text, sizeof text, "%s--max_duration=20", warm);
    expect_status(run(1, "warm-on", from("warm", text)), 0);
    expect_output("warm/step8, at step 8 of 20");
}

TEST(test_refusals)
{
    const struct {
        const char *run, *more, *error;
    } cases[] = {
        { "long", "--max_duration=22",
          "long/step20 is at 20 steps, but the decay would begin at 18, 4 before the end at "
          "22; expected an end at 24 or later" },
        { "long", "--max_duration=1ep", "give max_duration in steps or tokens" },
        { "long", "--max_duration=30 --scheduler.name=constant", "expected scheduler.name wsd" },
        { "long", "--max_duration=30 --reset_trainer_state", "extend continues the state" },
        { "long/step24", "--max_duration=30",
          "long/step24 was saved in the decay of its run, which lasts from 20 to 24 steps" },
        { "none", "--max_duration=30", "none: there is no checkpoint stepN" },
        { "cosine", "--max_duration=30", "does not have scheduler.name wsd" },
        { "epoch", "--max_duration=30", "has a max_duration in epochs" },
    };
    expect_status(run(1, "cosine", "--max_duration=1 --scheduler.name=cosine_with_warmup"), 0);
    expect_status(run(1, "epoch", "--max_duration=1ep --stop_at=1"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_status(run(1, "refused", from(cases[i].run, cases[i].more)), STATUS_INPUT);
        expect_output(cases[i].error);
        assert_false(exists("refused"));
    }
    /* no checkpoint is lost unless the user asks for it */
    expect_status(run(1, "short", from("short", "--max_duration=24")), STATUS_INPUT);
    expect_output("--save_overwrite goes back and deletes later checkpoints, --save_folder=... "
                  "uses another folder");
    assert_true(exists("short/step16"));
}

/* If the checkpoint of a longer run is in the decay, the run stops and changes nothing. With the
 * same length, the decay continues. Before the decay, the stable phase continues. */
TEST(test_decay_is_over)
{
    char text[256];
    shell("cd %s && ls -l short >before && cat short/metrics.jsonl >>before", folder);
    snprintf(text, sizeof text,
             "short/step16 was saved in the decay of its run, which lasts from 12 to 16 steps. The "
             "learning rate of step 17 would rise from 0.0001 to 0.001. To train longer, give "
             "--extend=%s/short and another save_folder",
             folder);
    expect_status(run(1, "short", "--max_duration=24 --try_load_latest_save"), STATUS_INPUT);
    expect_output(text);
    snprintf(text, sizeof text, "--max_duration=24 --load_path=%s/short/step16", folder);
    expect_status(run(1, "elsewhere", text), STATUS_INPUT);
    expect_output("--extend=");
    assert_false(exists("elsewhere/config.yaml"));
    shell("cd %s && ls -l short >after && cat short/metrics.jsonl >>after && cmp before after",
          folder);
    expect_status(run(1, "decays", "--max_duration=16 --stop_at=13"), 0);
    expect_status(run(1, "decays", "--max_duration=17 --try_load_latest_save"), STATUS_INPUT);
    expect_output("step 14 would rise from 0.00055 to 0.000775");
    expect_status(run(1, "decays", "--max_duration=16 --try_load_latest_save"), 0);
    check_rates("decays", 1, 16);
    expect_status(run(1, "stable", "--max_duration=16 --stop_at=12"), 0);
    expect_status(run(1, "stable", "--max_duration=20 --try_load_latest_save"), 0);
    check_rates("stable", 1, 20);
    assert_null(strstr(output, "the learning rate of step"));
}

/* Runs of 4 steps continue to step 10. The rate of step 5 follows the formula of each schedule. */
TEST(test_rises)
{
    static const struct {
        const char *name, *more;
        double planned, rate;
    } cases[] = {
        /* cos(3 pi/8) */
        { "cosine_with_warmup", "", 0.1, 0.7222075445642904 },
        { "linear_with_warmup", "", 0.1, 1 - 0.9 * 3 / 8 },
        { "linear_with_warmup", "--scheduler.t_max=4", 0.1, 0.1 },
        { "inverse_sqrt_with_warmup", "", 0.6324555320337, 0.6324555320337 },
        { "inverse_sqrt_with_warmup", "--scheduler.t_warmup=0 --scheduler.warmup_fraction=0.5",
          0.6324555320337, 1 },
        { "constant_with_warmup", "", 1, 1 },
        { "constant", "", 1, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double rate[MAX_STEPS];
        char text[512], expected[256], name[16];
        snprintf(name, sizeof name, "rises%zu", i);
        snprintf(text, sizeof text,
                 "--scheduler.t_decay=null --scheduler.name=%s %s --try_load_latest_save",
                 cases[i].name, cases[i].more);
        expect_status(train(1, WSD "%s --save_folder=%s/%s --max_duration=4", text, folder, name),
                      0);
        expect_status(train(1, WSD "%s --save_folder=%s/%s --max_duration=10", text, folder, name),
                      0);
        metric(rate, name, "optim/learning_rate_group0");
        if (!(fabs(rate[5] - 1e-3 * cases[i].rate) <= 1e-9))
            fail_msg("%s %s: rate %.12g, expected %.12g", cases[i].name, cases[i].more, rate[5],
                     1e-3 * cases[i].rate);
        snprintf(
            expected, sizeof expected,
            "the learning rate of step 5 is %.3g; with the schedule of %s/%s/step4 it would be "
            "%.3g",
            1e-3 * cases[i].rate, folder, name, 1e-3 * cases[i].planned);
        if (cases[i].rate > cases[i].planned)
            expect_output(expected);
        else
            assert_null(strstr(output, "the learning rate of step"));
    }
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
