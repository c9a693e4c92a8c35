/* Runs whose checkpoints are moved, linked or replaced. The files, and not their place, decide to
 * which run a checkpoint belongs. */
#include "tests/test.h"
#include "tests/launch.h"

/* One rank, without mpirun, because mpirun takes longer to start than the run takes. */
static int alone(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int alone(const char *format, ...)
{
    char arguments[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);
    return finish(start_command("%s/train configs/tiny.yaml %s %s %s",
                                setting("BUILD", "build/cpu"), SMALL, ids, arguments));
}

static const char eight[] = "--max_duration=8 --save_interval=2 --save_num_checkpoints_to_keep=9";

/* Six of eight steps. */
static void begin(const char *run)
{
    expect_status(alone("%s --stop_at=6 --save_folder=%s/%s", eight, folder, run), 0);
}

/* Checks that a run's metrics have each step once, and checks its checkpoints. */
static void expect_run(const char *run, int steps, const char *checkpoints)
{
    double loss[MAX_STEPS], undisturbed[MAX_STEPS];
    losses(loss, run, steps);
    losses(undisturbed, "whole", 8);
    for (int i = 1; i <= steps; i++)
        assert_true(loss[i] == undisturbed[i]);
    shell("cd %s/%s && test \"$(echo step*)\" = '%s'", folder, run, checkpoints);
}

TEST(test_whole)
{
    expect_status(alone("%s --save_folder=%s/whole", eight, folder), 0);
    expect_run("whole", 8, "step2 step4 step6 step8");
}

/* The newest checkpoint is in another place, and a resumed run finds it. */
TEST(test_newest_is_elsewhere)
{
    static const struct {
        const char *moves, *with, *left;
    } table[] = {
        { "mv step6 ../big; ln -s ../big/step6 step6", "--try_load_latest_save",
          "step2 step4 step6 step8" },
        { "mv step6 ../big; ln -s ../big/step6 step6", "--try_load_latest_save --save_overwrite",
          "step2 step4 step6 step8" },
        { "mv step6 ../big; ln -sfn \"$PWD\"/../big/step6 latest",
          "--try_load_latest_save --save_overwrite", "step2 step4 step8" },
        { "mv step6 ../big/best; ln -sfn ../big/best latest",
          "--try_load_latest_save --save_overwrite", "step2 step4 step8" },
        { "mv step6 ../big; ln -s ../big/step6 step6", "--load_path=%1$s/run/step6",
          "step2 step4 step6 step8" },
        { "mv step6 ../big; ln -s ../big/step6 step6",
          "--load_path=%1$s/big/step6 --save_overwrite", "step2 step4 step6 step8" },
        { "mv step6 ../big; rm latest", "--load_path=%1$s/big/step6 --save_overwrite",
          "step2 step4 step8" },
        { "mv step6 ../big; rm latest", "--load_path=%1$s/big/step6", "step2 step4 step8" },
        { "mv step6 ../big; rm latest; ln -s \"$PWD\" ../other",
          "--load_path=%1$s/other/../big/step6", "step2 step4 step8" },
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        char with[512];
        begin("run");
        shell("cd %s/run && mkdir ../big && %s", folder, table[i].moves);
        snprintf(with, sizeof with, table[i].with, folder);
        expect_status(alone("%s --save_folder=%s/run %s", eight, folder, with), 0);
        expect_output("at step 6 of 8");
        expect_run("run", 8, table[i].left);
        shell("cd %s && ls big/*/trainer.json >/dev/null && rm -rf run big other", folder);
    }
}

/* Goes back to step 4, which is in another place. Later checkpoints are deleted, earlier ones stay.
 * After an interruption before the next save, the run resumes from step 4. */
TEST(test_back_to_elsewhere)
{
    static const char *const moves[] = { "ln -s ../big/step4 step4", "true" };
    for (int i = 0; i < 2; i++) {
        begin("run");
        shell("cd %s/run && mkdir ../big && mv step4 ../big && %s", folder, moves[i]);
        expect_status(
            alone("--max_duration=8 --load_path=%s/big/step4 --save_folder=%s/run", folder, folder),
            STATUS_INPUT);
        expect_output("--save_overwrite goes back");
        expect_status(
            alone("%s --stop_at=4 --load_path=%s/big/step4 --save_folder=%s/run --save_overwrite",
                  eight, folder, folder),
            0);
        expect_run("run", 4, i == 0 ? "step2 step4" : "step2");
        expect_status(alone("%s --try_load_latest_save --save_folder=%s/run", eight, folder), 0);
        expect_output("at step 4 of 8");
        expect_run("run", 8, i == 0 ? "step2 step4 step6 step8" : "step2 step6 step8");
        shell("rm -r %s/run %s/big", folder, folder);
    }
}

/* A new run in the folder of an old run starts from a model in this folder, and ends before its
 * first save. A resume does not continue the replaced run. */
TEST(test_begun_anew)
{
    static const struct {
        const char *make, *with;
    } table[] = {
        { "mkdir base; cp step6/config.json step6/model.safetensors base",
          "--load_path=%1$s/run/base" },
        { "mkdir ../base; cp step6/config.json step6/model.safetensors ../base; ln -s ../base base",
          "--load_path=%1$s/run/base" },
        { "cp -r step6 ../base", "--load_path=%1$s/base --reset_trainer_state" },
        { "true", "" },
    };
    shell("(head -c 2048 build/few-ids/train.npy; head -c 2048 /dev/zero | tr '\\0' '\\377') "
          ">%s/bad.npy",
          folder);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        char with[512];
        begin("run");
        shell("cd %s/run && %s", folder, table[i].make);
        snprintf(with, sizeof with, table[i].with, folder);
        expect_status(alone("--max_duration=8 --data.paths=[%s/bad.npy] --save_folder=%s/run "
                            "--save_overwrite %s "
                            "--model.max_sequence_length=2048 --global_train_batch_size=1 "
                            "--device_train_microbatch_size=1",
                            folder, folder, with),
                      STATUS_INPUT);
        expect_output("is 65535, but the vocabulary has 1000 ids");
        expect_output("there is no checkpoint in");
        shell("cd %s/run && test ! -e latest && test -z \"$(ls -d step* 2>/dev/null)\"", folder);
        expect_status(
            alone("--max_duration=2 --save_folder=%s/run --try_load_latest_save %s", folder, with),
            0);
        expect_output(i == 3 ? "initialized with seed" : "beginning at step 0");
        shell("rm -rf %s/run %s/base", folder, folder);
    }
}

/* A run that starts from the weights of a checkpoint in its own folder would delete it. */
TEST(test_own_folder)
{
    static const char *const with[] = { "--reset_trainer_state", "--lora.rank=2" };
    begin("run");
    for (int i = 0; i < 2; i++) {
        expect_status(alone("--max_duration=8 --load_path=%s/run/step4 %s --save_folder=%s/run "
                            "--save_overwrite",
                            folder, with[i], folder),
                      STATUS_INPUT);
        expect_output(i == 0 ? "a save_folder of its own" : "a save_folder of their own");
    }
    expect_run("run", 6, "step2 step4 step6");
    shell("rm -r %s/run", folder);
}

int main(void)
{
    return run_all_tests(make_folder, remove_folder);
}
