/* A diverged run does no other harm: older checkpoints stay, `latest` does not move, and the run
 * does not end with status 0. */
#include <math.h>

#include "model/run/divergence.h"
#include "tests/test.h"
#include "tests/launch.h"

static const char TINY[] =
    "--model.d_model=16 --model.mlp_hidden_size=32 --model.max_sequence_length=8 "
    "--console_log_interval=1000";

/* A weight decay that multiplies the weights by -99 in each step. */
static const char DIVERGES[] =
    "--optimizer.learning_rate=1000 --optimizer.weight_decay=0.1 --scheduler.t_warmup=0";

/* Checks that the folder of a run has exactly these checkpoints, each name followed by a blank, and
 * that the link points to `latest`; NULL: there is no link. */
static void expect_checkpoints(const char *run, const char *names, const char *latest)
{
    char found[1024] = "", command[512], expected[256];
    snprintf(command, sizeof command,
             "cd %s/%s && ls -d step* 2>/dev/null | tr '\n' ' '; readlink latest", folder, run);
    FILE *p = popen(command, "r");
    assert_non_null(p);
    size_t n = fread(found, 1, sizeof found - 1, p);
    pclose(p);
    found[n] = '\0';
    snprintf(expected, sizeof expected, "%s%s%s", names, latest ? latest : "", latest ? "\n" : "");
    if (strcmp(found, expected) != 0) {
        fprintf(stderr, "%s\n", output);
        fail_msg("%s holds '%s', expected '%s'", run, found, expected);
    }
}

/* Overwrites the last four bytes of a checkpoint file: an element of its last tensor, in F32,
 * little endian. */
static void poke(const char *checkpoint, const char *file, const char *bytes)
{
    shell("cd %s/%s && printf '%s' | dd of=%s bs=1 conv=notrunc seek=$(($(stat -c %%s %s) - 4)) "
          "2>/dev/null",
          folder, checkpoint, bytes, file, file);
}

/* If the files differ from the saved state, the run must neither continue from them nor delete
 * earlier checkpoints. */
TEST(test_damaged_checkpoint)
{
    static const struct {
        const char *file, *bytes;
    } damage[] = {
        { "model.safetensors", "\\0\\0\\300\\177" },
        { "optimizer-00001.states", "\\0\\0\\300\\177" },
        /* -1: the last tensor is an exp_avg_sq */
        { "optimizer-00001.states", "\\0\\0\\200\\277" },
    };
    static const char more[] = "--save_interval=2 --save_num_checkpoints_to_keep=2";
    expect_status(train(1, "%s %s --max_duration=6 --save_folder=%s/good", TINY, more, folder), 0);
    expect_checkpoints("good", "step4 step6 ", "step6");
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++) {
        shell("rm -rf %s/damaged && cp -r %s/good %s/damaged", folder, folder, folder);
        poke("damaged/step6", damage[i].file, damage[i].bytes);
        assert_int_not_equal(
            train(1, "%s %s --max_duration=30 --try_load_latest_save --save_folder=%s/damaged",
                  TINY, more, folder),
            0);
        expect_checkpoints("damaged", "step4 step6 ", "step6");
        expect_output("damaged/step6");
    }
}

/* Returns the first step whose gradient was not finite. */
static int first_lost(const char *run)
{
    double norm[MAX_STEPS];
    int step = 1;
    metric(norm, run, "optim/total_grad_norm");
    while (step < MAX_STEPS - 1 && isfinite(norm[step]))
        step++;
    return step;
}

/* Every step is saved and one checkpoint is kept: the last one that a finite step followed. */
TEST(test_divergence)
{
    char latest[64], names[128];
    if (on_gpu()) /* on a GPU attention gives NaN at once, before any checkpoint */
        skip();
    assert_int_not_equal(train(2,
                               "%s %s --max_duration=60 --save_interval=1 "
                               "--save_num_checkpoints_to_keep=1 --save_folder=%s/one",
                               TINY, DIVERGES, folder),
                         0);
    /* before anything is saved, because saving may fail */
    expect_output("third step in a row whose loss or gradient is not finite\n");
    expect_output("the last checkpoint is ");
    expect_output("this model has diverged");
    const int lost = first_lost("one");
    assert_in_range(lost, 4, 55);
    /* the update of step lost - 1 caused the divergence */
    snprintf(latest, sizeof latest, "step%d", lost - 2);
    snprintf(names, sizeof names, "%s step%d-aborted ", latest, lost + 2);
    expect_checkpoints("one", names, latest);

    /* two steps before the end: neither success nor a checkpoint; a resume gives the same result */
    for (int i = 0; i < 2; i++) {
        assert_int_not_equal(
            train(2,
                  "%s %s --max_duration=60 --stop_at=%d --save_interval=2 --try_load_latest_save "
                  "--save_folder=%s/two",
                  TINY, DIVERGES, lost + 1, folder),
            0);
        expect_output("two steps");
        snprintf(latest, sizeof latest, "step%d", (lost - 2) / 2 * 2);
        assert_true(exists("two/latest/trainer.json"));
        shell("test $(readlink %s/two/latest) = %s", folder, latest);
        snprintf(names, sizeof names, "two/step%d", lost + 1);
        assert_false(exists(names));
    }
    /* the last update causes the divergence: only a later loss would show it */
    assert_int_not_equal(train(1, "%s %s --max_duration=60 --stop_at=%d --save_folder=%s/last",
                               TINY, DIVERGES, lost - 1, folder),
                         0);
    snprintf(names, sizeof names, "step%d-aborted ", lost - 1);
    expect_output("after the update of this step the loss or the gradient norm is not finite");
    expect_checkpoints("last", names, NULL);
    /* a run that keeps no checkpoints writes no -aborted folder */
    assert_int_not_equal(
        train(1, "%s %s --max_duration=60 --save_num_checkpoints_to_keep=0 --save_folder=%s/none",
              TINY, DIVERGES, folder),
        0);
    expect_checkpoints("none", "", NULL);
    expect_output("there is no checkpoint in ");
}

/* ---- spikes ---------------------------------------------------------------------------------- */

enum { BEFORE = 66, STEPS = 70 }; /* scores begin at step 64 */

/* A resumed run has the same scores as an uninterrupted run, and the same window at its end. */
TEST(test_window_resumes)
{
    static const char *const names[] = { "train/CrossEntropyLoss_z_score",
                                         "optim/total_grad_norm_z_score" };
    double whole[MAX_STEPS], parts[MAX_STEPS];
    expect_status(train(1, "%s --max_duration=%d --save_folder=%s/whole", TINY, STEPS, folder), 0);
    expect_status(train(1, "%s --max_duration=%d --stop_at=%d --save_folder=%s/parts", TINY, STEPS,
                        BEFORE, folder),
                  0);
    shell("cp -r %s/parts %s/before", folder, folder);
    expect_status(train(1, "%s --max_duration=%d --try_load_latest_save --save_folder=%s/parts",
                        TINY, STEPS, folder),
                  0);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(metric(whole, "whole", names[k]), STEPS - 63);
        assert_int_equal(metric(parts, "parts", names[k]), STEPS - 63);
        for (int i = 64; i <= STEPS; i++)
            if (!(whole[i] == parts[i]))
                fail_msg("%s of step %d: %.9g in one run, %.9g after resuming", names[k], i,
                         whole[i], parts[i]);
    }
    shell("cmp %s/whole/step%d/trainer.json %s/parts/step%d/trainer.json", folder, STEPS, folder,
          STEPS);
}

/* After 66 steps of text, a single token repeats, so the gradients of all positions agree. The
 * first such step is a spike. The run reports it, skips it, or ends. */
TEST(test_spike)
{
    static const char *const action[] = { "warn", "skip", "stop" };
    char names[64], latest[16];
    shell("yes | tr 'y\\n' '\\3\\0' | head -c 4000 >%s/same.npy", folder);
    for (int i = 0; i < 3; i++) {
        shell("rm -rf %s/spike && cp -r %s/before %s/spike", folder, folder, folder);
        const int status =
            train(2,
                  "%s --max_duration=%d --try_load_latest_save --restore_dataloader=false "
                  "--data.paths=[%s/same.npy] --spikes=%s --save_folder=%s/spike",
                  TINY, BEFORE + 1, folder, action[i], folder);
        expect_output("step 67: a spike: loss ");
        if (i < 2) {
            expect_status(status, 0);
            assert_int_equal(trainer("spike/step67", "updates"), i == 0 ? 67 : 66);
            continue;
        }
        assert_int_not_equal(status, 0);
        expect_output("a spike ends the run");
        snprintf(latest, sizeof latest, "step%d", BEFORE);
        snprintf(names, sizeof names, "%s %s-aborted ", latest, latest);
        expect_checkpoints("spike", names, latest);
        shell("cmp %s/before/step66/model.safetensors %s/spike/step66-aborted/model.safetensors",
              folder, folder);
    }
}

/* The loss is more than twice the loss of an untrained model, which is the log of the vocabulary
 * size. */
TEST(test_limit)
{
    static const struct {
        double part;
        bool diverged;
    } losses[] = { { 1.9, false }, { 2.1, true }, { 1.9, false } };
    const Config c = { .model.vocab_size = 100 };
    Run r = { .config = &c };
    for (int i = 0; i < 3; i++) {
        divergence_warn(&r, &(StepStats){ .labels = 1,
                                          .finite = true,
                                          .cross_entropy = losses[i].part * log(100) });
        assert_int_equal(r.diverged, losses[i].diverged);
    }
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
